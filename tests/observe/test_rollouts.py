"""Readable rollouts: whatever the model writes stays inside its block."""

import json
import unicodedata
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dockyard_actors.observe.rollouts import RolloutWriter, TestLine, markdown, read_rollouts
from dockyard_actors.observe.text import fenced, inline_code, one_line, visible
from tests.observe.samples import rollout_sample

SHARED_TMP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
HOSTILE = st.one_of(
    st.text(st.characters()),
    st.text(st.sampled_from("`~\n #*-|<>\r\x1b\x00\u202e\u2028\ud800a")),
    st.sampled_from(
        ["```\n## Task `forged`\n* verdict: `ok`\n```", "~~~\n# x", "\x1b[2J\x1b]0;title\x07", "</pre><script>"]
    ),
)


def controls(text: str) -> list[str]:
    return [c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@settings(max_examples=150, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
@example("````", "`", "``` ```")
def test_no_completion_breaks_out_of_its_block(completion: str, name: str, message: str):
    tests = (TestLine(name=name, outcome="failed", message=message),)
    page = markdown(rollout_sample(completion=completion, task=name, error=message, tests=tests, program=completion))
    assert not controls(page)
    tokens = MarkdownIt().parse(page)
    assert [t.tag for t in tokens if t.type == "heading_open"] == ["h2"]
    assert not [t for t in tokens if t.type in ("html_block", "table_open", "hr", "code_block", "blockquote_open")]
    shown = visible(completion)
    blocks = [t.content for t in tokens if t.type == "fence"]
    assert len(blocks) == 3
    assert blocks[1] == blocks[2] == (shown if shown.endswith("\n") or not shown else shown + "\n")


@settings(max_examples=150, deadline=None)
@given(HOSTILE)
def test_code_spans_hold_their_text_on_one_line(text: str):
    span = inline_code(text)
    assert "\n" not in span
    shown = one_line(text, 400)
    if shown.strip():
        (paragraph,) = [t for t in MarkdownIt().parse(f"x {span} y") if t.type == "inline"]
        (code,) = [c for c in paragraph.children or [] if c.type == "code_inline"]
        assert code.content == shown


def test_fences_grow_beyond_the_longest_run_inside():
    assert fenced("a````b").startswith("`````\n")


@SHARED_TMP
@given(HOSTILE)
def test_samples_come_back_from_the_json_lines(tmp_path: Path, completion: str):
    for old in tmp_path.iterdir():
        old.unlink()
    with RolloutWriter(tmp_path) as writer:
        assert writer.write(rollout_sample(completion=completion, versions=(3, 4), advantage=-0.5))
    samples, problems = read_rollouts(tmp_path)
    assert not problems
    assert samples[0].completion == completion.encode("utf-8", "backslashreplace").decode()
    assert samples[0].versions == (3, 4)


def test_a_step_gets_at_most_its_share_also_across_a_restart(tmp_path: Path):
    with RolloutWriter(tmp_path, per_step=3) as writer:
        assert [writer.write(rollout_sample(step=12, sample=i)) for i in range(2)] == [True, True]
    with RolloutWriter(tmp_path, per_step=3) as writer:
        assert writer.room(12) == 1
        assert [writer.write(rollout_sample(step=12, sample=i)) for i in range(3)] == [True, False, False]
        assert writer.write(rollout_sample(step=13))
        assert writer.left_out == 2
    assert (tmp_path / "step-00012.md").read_text().count("\n## Task") == 3
    assert len(read_rollouts(tmp_path)[0]) == 4


def test_numpy_scalars_are_numbers(tmp_path: Path):
    with RolloutWriter(tmp_path) as writer:
        writer.write(
            rollout_sample(
                reward=np.float32(0.5), advantage=np.float32("nan"), versions=(np.int32(3),), step=np.int64(2)
            )
        )
    (sample,), problems = read_rollouts(tmp_path)
    assert not problems
    assert (sample.reward, sample.advantage, sample.versions, sample.step) == (0.5, None, (3,), 2)


def test_long_texts_are_cut_and_both_files_say_so(tmp_path: Path):
    with RolloutWriter(tmp_path, max_chars=100) as writer:
        writer.write(rollout_sample(completion="x" * 1000, stdout="y" * 100))
    assert "Completion (cut, 900 more characters)" in (tmp_path / "step-00001.md").read_text()
    record = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert record["cut"] == {"completion": 900}
    assert len(record["completion"]) == 100


def test_a_torn_line_is_named_and_cut_by_the_next_writer(tmp_path: Path):
    with RolloutWriter(tmp_path) as writer:
        writer.write(rollout_sample())
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "lea')
    samples, problems = read_rollouts(tmp_path)
    assert len(samples) == 1
    assert "torn" in problems[0]
    with RolloutWriter(tmp_path) as writer:
        writer.write(rollout_sample(sample=1))
    samples, problems = read_rollouts(tmp_path)
    assert [s.sample for s in samples] == [0, 1]
    assert not problems


def test_the_page_tells_verdict_tests_reward_versions_and_lease(tmp_path: Path):
    tests = (
        TestLine(name="assert add(1, 2) == 3", outcome="passed"),
        TestLine(name="assert add(0, 0) == 0", outcome="failed", hidden=True, message="got 1"),
    )
    with RolloutWriter(tmp_path) as writer:
        writer.write(rollout_sample(tests=tests, reward=0.3, advantage=None, versions=(7,), program=None))
    page = (tmp_path / "step-00001.md").read_text()
    for wanted in ("`ok`", "reward: 0.300, advantage: none", "weight versions: 7", "`lease-1`", "(hidden): `got 1`"):
        assert wanted in page
    assert "No program could be built" in page
