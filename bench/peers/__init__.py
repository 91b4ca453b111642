"""The sides of the control benchmark: ours and its peers, each driven in a process of its own."""
