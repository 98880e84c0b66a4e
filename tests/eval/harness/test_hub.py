"""Where the hub cannot be reached, every data set that is missing is named, and the hub is asked once."""

from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from qed.cli import app
from qed.eval.harness import hub
from qed.eval.harness.ruler import QUESTIONS
from qed.eval.harness.suites import MEMBERS, SUITES
from tests.marks import slow


@pytest.fixture
def online(offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)


@pytest.fixture
def asked(online: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were asked, none of which answers."""
    found: list[str] = []

    def reachable(address: str) -> bool:
        found.append(address)
        return False

    monkeypatch.setattr(hub, "_reachable", reachable)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suite", slow("commonsense", "ruler"))
def test_all_that_is_missing_is_named_at_once(suite: str, checkpoint: Path, asked: list[str], tmp_path: Path) -> None:
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    words = ["eval", str(checkpoint), "--suite", suite, "--lengths", "2048", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    text = " ".join(done.output.split())
    assert done.exit_code == 1
    if suite == "commonsense":
        assert f"--data: expected NAME=FILE, or the data set from the hub, for {', '.join(SUITES[suite])}" in text
    else:
        essays = ", ".join(name for name in SUITES[suite] if MEMBERS[name].essays)
        assert f"--essays: expected FILE, or what lm-eval downloads, for {essays}; got neither" in text
        questions = ", ".join(QUESTIONS)
        assert f"--data: expected NAME=FILE, or what lm-eval downloads, for {questions}; got neither" in text
    assert "the hub does not answer" in text
    assert asked == [constants.ENDPOINT]
    assert before == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_hub_is_not_asked_where_all_is_given(checkpoint: Path, asked: list[str], tmp_path: Path) -> None:
    from qed.bench import made_up

    made_up.write(tmp_path, ["sciq"], 4)
    words = ["eval", str(checkpoint), "--harness", "lm-eval", "--task", "sciq", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "--data", f"sciq={tmp_path / 'sciq.jsonl'}"])
    assert (done.exit_code, asked) == (0, []), done.output


def test_an_error_without_words_is_named() -> None:
    assert hub.reason(TimeoutError()) == "TimeoutError: no more is said"


def test_an_address_answers_or_not(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has only errors is there; a closed port is not."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Errors(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Errors) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.handle_request)
        thread.start()
        assert hub._reachable(address)
        thread.join()
    assert not hub._reachable(address)
