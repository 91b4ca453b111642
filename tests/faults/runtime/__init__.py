"""Faults that the runtime is proven against, each in real processes unless it says "simulated" (tests/runtime/test_simulation*.py).

| fault | test |
|---|---|
| callee SIGKILLed in mid-ask | tests/runtime/test_agent.py::test_a_killed_process_is_known_to_watchers_fails_pending_asks_and_comes_back |
| SIGSTOP, then CONT | tests/runtime/test_membership.py::test_a_member_on_another_host_that_is_silent_for_its_lease_is_dead_and_ends_when_it_wakes_up |
| SIGSTOP, then CONT, within the lease | tests/faults/runtime/test_network.py::test_what_a_stopped_process_is_asked_is_had_when_it_goes_on |
| hung loop | tests/runtime/test_agent.py::test_a_stopped_loop_is_killed_and_restarted_and_the_cause_says_so |
| crash loop in start-up | tests/runtime/test_agent.py::test_a_crash_loop_gives_up_with_the_first_cause |
| node agent killed | tests/runtime/test_agents.py::test_a_killed_primary_leaves_no_orphan_and_its_directory_is_swept_by_the_next |
| secondary node agent killed or hung | tests/runtime/test_agents.py::test_when_a_secondary_dies_or_hangs_all_its_processes_count_as_dead |
| controller killed and restarted | tests/faults/test_kills.py::test_a_killed_role_costs_nothing_but_time |
| registry killed and restarted | tests/runtime/test_membership.py::test_no_ask_fails_while_the_registry_is_dead_and_the_next_one_learns_what_the_living_know |
| primary agent killed and restarted | tests/runtime/test_primary_restart.py::test_a_secondarys_processes_live_on_without_their_primary_and_join_the_next_one |
| full partition and heal | tests/faults/runtime/test_network.py::test_a_full_partition_ends_asks_by_their_deadline_and_heals |
| one-way partition, requests | tests/faults/runtime/test_network.py::test_a_request_held_on_its_way_is_done_once_however_often_it_is_repeated |
| one-way partition, replies | tests/faults/runtime/test_network.py::test_a_reply_held_on_the_way_back_is_had_without_doing_it_again |
| 30 % packet loss | tests/faults/runtime/test_network.py::test_thirty_percent_packet_loss_and_dying_connections_do_nothing_twice |
| 200 ms delay and jitter | tests/faults/runtime/test_network.py::test_delay_and_jitter_cost_time_and_nothing_else |
| half-open TCP | tests/faults/runtime/test_network.py::test_a_half_open_connection_is_noticed_and_made_anew |
| connection cut in mid-frame | tests/faults/runtime/test_network.py::test_a_connection_cut_in_the_middle_of_a_frame_costs_that_message_alone |
| duplicated messages | tests/runtime/test_scope.py::test_a_message_that_the_network_brings_twice_is_handled_once |
| duplicated and reordered, simulated | tests/runtime/test_simulation.py::test_what_is_promised_holds_in_every_history |
| slow consumer under flood | tests/faults/runtime/test_network.py::test_control_messages_pass_a_flood_of_a_slow_consumer_and_neither_side_grows_with_it |
| slow consumer, memory | tests/runtime/test_scope.py::test_a_window_counts_bytes_and_one_large_message_still_passes |
| garbage on the port | tests/transport/test_control.py::test_bytes_of_strangers_on_a_loopback_port_never_reach_the_receiver |
| slowloris | tests/faults/runtime/test_limits.py::test_strangers_who_connect_and_say_nothing_are_cut_and_delay_nobody |
| oversize frame | tests/transport/test_control.py::test_an_envelope_too_large_for_control_is_refused_at_the_sender_and_harms_nobody |
| wrong protocol version | tests/transport/test_control.py::test_another_protocol_major_and_another_runs_cookie_are_refused_with_the_reason |
| hello lost with its connection | tests/faults/runtime/test_identity.py::test_a_hello_that_dies_with_its_connection_is_said_again |
| routing id stolen | tests/faults/runtime/test_identity.py::test_under_curve_a_stranger_cannot_take_over_a_connection_even_with_its_routing_id |
| flood of nonsense | tests/faults/runtime/test_identity.py::test_a_flood_of_different_nonsense_costs_bounded_memory_and_log |
| another major with another hello | tests/faults/runtime/test_identity.py::test_another_major_is_refused_by_name_whatever_its_hello_looks_like |
| duplicate identity | tests/runtime/test_registry.py::test_a_second_process_under_the_uid_of_a_living_one_is_refused |
| disk full | tests/faults/runtime/test_limits.py::test_a_process_that_cannot_start_for_want_of_disk_says_so_and_leaves_nothing |
| EMFILE | tests/faults/runtime/test_limits.py::test_a_process_without_descriptors_answers_whom_it_knows_and_takes_newcomers_when_it_has_some |
| EMFILE at dialling | tests/faults/runtime/test_limits.py::test_an_ask_that_finds_no_descriptor_to_dial_waits_for_one_within_its_deadline |
| EMFILE at start | tests/faults/runtime/test_limits.py::test_a_system_that_finds_no_descriptor_says_so |
| wall clock jump, simulated | tests/runtime/test_simulation_scenarios.py::test_the_wall_clock_may_jump |
| zombie that wakes up, simulated | tests/runtime/test_simulation_scenarios.py::test_a_process_declared_dead_while_it_was_stopped_cannot_act_when_it_wakes_up |
"""
