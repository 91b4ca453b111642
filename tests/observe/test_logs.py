"""Role logs: one line a record, and no credential in any of them."""

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.observe.logs import LOG_LINE, LineFormatter, LogSetup, Redactor, setup_logging

ENV = {
    "HF_TOKEN": "plainlookingvalue",
    "API_TOKEN": "s3cret/with+signs==",
    "AWS_SECRET_ACCESS_KEY": "multi\nline secret",
    "MAX_TOKENS": "1234567890",
    "SSH_KEY_FILE": "/home/user/key.pem",
    "TOKENIZERS_PARALLELISM": "false-false",
    "SHORT_TOKEN": "abc",
    "PATH": "/usr/bin:/bin",
}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[LogSetup]:
    setup = setup_logging("trainer", tmp_path, level="info", environ=ENV)
    yield setup
    setup.close()


def lines(tmp_path: Path) -> list[str]:
    return (tmp_path / "trainer.log").read_text().splitlines()


def test_a_record_is_one_line_of_the_documented_form(setup: LogSetup, tmp_path: Path):
    logging.getLogger("a.b").info("step %d\nforged line", 3)
    logging.getLogger("a.b").debug("not shown")
    (line,) = lines(tmp_path)
    match = LOG_LINE.fullmatch(line)
    assert match is not None
    assert match["level"] == "INFO"
    assert (match["role"], match["pid"], match["logger"]) == ("trainer", str(os.getpid()), "a.b")
    assert match["message"] == "step 3\\nforged line"


def test_a_traceback_stays_on_the_line_of_its_record_and_is_redacted(setup: LogSetup, tmp_path: Path):
    try:
        raise ValueError(f"bad {ENV['API_TOKEN']}")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = lines(tmp_path)
    assert "Traceback" in line
    assert line.endswith("ValueError: bad [redacted API_TOKEN]")


def test_python_warnings_are_logged(setup: LogSetup, tmp_path: Path):
    warnings.warn("old way", UserWarning, stacklevel=1)
    assert any("old way" in line for line in lines(tmp_path))


@pytest.mark.parametrize("name", ["HF_TOKEN", "API_TOKEN", "AWS_SECRET_ACCESS_KEY"])
def test_values_of_secret_environment_variables_are_replaced(name: str):
    assert Redactor(ENV)(f"<{ENV[name]}>") == f"<[redacted {name}]>"


def test_a_secret_with_a_newline_is_replaced_in_the_line():
    formatter = LineFormatter("r", Redactor(ENV))
    record = logging.LogRecord("n", logging.INFO, "", 0, "got %s", (ENV["AWS_SECRET_ACCESS_KEY"],), None)
    assert formatter.format(record).endswith("n: got [redacted AWS_SECRET_ACCESS_KEY]")


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 10,
        "ghp_" + "x1Y2" * 9,
        "sk-" + "proj1234" * 4,
        "AKIA" + "ABCDEFGH12345678",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_DEF-123",
        "https://user:pa55word@host/x",
        "Authorization: Bearer abcdef123456",
        'api_key="a1b2c3d4e5f6g7"',
        "password=correct1horse2battery",
    ],
)
def test_texts_shaped_like_credentials_are_replaced(secret: str):
    redacted = Redactor({})(f"using {secret} now")
    assert "[redacted]" in redacted
    assert redacted.startswith("using ")
    assert redacted.endswith(" now")


@pytest.mark.parametrize(
    "text",
    [
        "tokens=312 token: 5 max_tokens=64",
        "key prompt-12 missing",
        "MAX_TOKENS 1234567890",
        "reading /home/user/key.pem",
        "false-false abc /usr/bin:/bin",
        "tokens_per_s: 123456789012.5",
        "ipc:///tmp/x/sock@1",
    ],
)
def test_ordinary_texts_stay(text: str):
    assert Redactor(ENV)(text) == text


def test_a_secret_read_from_a_file_can_be_added_but_not_one_too_short():
    redactor = Redactor({})
    redactor.add("from-a-file", "token file")
    assert redactor("x from-a-file") == "x [redacted token file]"
    with pytest.raises(ValueError, match="at least"):
        redactor.add("abc")


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters()))
def test_no_message_makes_a_second_line_or_a_control_code(text: str):
    formatter = LineFormatter("r", Redactor({}))
    line = formatter.format(logging.LogRecord("n", logging.INFO, "", 0, text, None, None))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    line.encode()


def test_closing_gives_the_root_logger_back(tmp_path: Path):
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    setup_logging("buffer", tmp_path, level="DEBUG", stderr=True).close()
    assert (list(root.handlers), root.level) == before


def test_an_unknown_level_and_a_log_to_nowhere_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="chatty"):
        setup_logging("x", tmp_path, level="chatty")
    with pytest.raises(ValueError, match="vanish"):
        setup_logging("x", None)
