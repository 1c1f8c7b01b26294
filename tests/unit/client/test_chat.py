"""`tinsmith chat`: one answer for a script, a conversation for a person, and how both end."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.client.stub_server import GOOD_KEY, WELL, Answer, stub_server
from tinsmith.chat import shown
from tinsmith.cli import main
from tinsmith.local_server import tinsmith_command
from typing_extensions import override

CHAT = "/oai/api/v1/chat/completions"
Run = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    """Typed lines, as standard input of a terminal."""

    @override
    def isatty(self) -> bool:
        return True


def chunk(content: str, finish: str | None = None, **more: str) -> str:
    choice = {"index": 0, "delta": {"content": content, **more}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def streamed(*chunks: str) -> Answer:
    return 200, "".join([*chunks, "data: [DONE]\n\n"])


def refused(status: int, message: str) -> Answer:
    return status, {"error": {"message": message, "type": "t", "code": None}}


GREETING = streamed(chunk("Good "), chunk("", reasoning_content="Hm"), chunk("day", "stop"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TINKER_API_KEY", GOOD_KEY)

    def run(*words: str, typed: io.StringIO | None = None) -> tuple[int, str, str]:
        """Return exit status, standard output, standard error."""
        monkeypatch.setattr(sys, "stdin", typed or io.StringIO())
        with pytest.raises(SystemExit) as end:
            main(["chat", *words])
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return run


def test_one_message_prints_the_answer_alone_with_the_options_that_were_given(run: Run) -> None:
    received: list[Any] = []
    options = ("--system", "Be brief.", "--max-tokens", "5", "--temperature", "0")
    with stub_server({CHAT: GREETING}, received=received) as url:
        assert run("greeter", "--message", "Hello", *options, "--base-url", url) == (0, "Good day\n", "")
        assert run("greeter", "--message", "Hello", "--base-url", url)[0] == 0
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    asked = {"model": "greeter", "stream": True}
    assert received == [
        {**asked, "messages": [system, hello], "max_tokens": 5, "temperature": 0},
        {**asked, "messages": [hello]},
    ]


def test_a_pipe_is_one_message(run: Run) -> None:
    received: list[Any] = []
    with stub_server({CHAT: GREETING}, received=received) as url:
        assert run("greeter", "--base-url", url, typed=io.StringIO("two\nlines\n")) == (0, "Good day\n", "")
    assert received[0]["messages"] == [{"role": "user", "content": "two\nlines\n"}]


@pytest.mark.parametrize(("words", "piped"), [(["--message", " "], ""), ([], "\n")], ids=["option", "pipe"])
def test_an_empty_message_is_a_misuse(run: Run, words: list[str], piped: str) -> None:
    status, out, err = run("greeter", *words, typed=io.StringIO(piped))
    assert (status, out) == (2, "")
    assert "the message is empty" in err


def test_a_truncated_answer_is_reported_on_standard_error(run: Run) -> None:
    with stub_server({CHAT: streamed(chunk("Good", "length"))}) as url:
        answer = run("greeter", "--message", "Hello", "--base-url", url)
    assert answer == (0, "Good\n", "(the answer reached its token limit)\n")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (refused(404, "there is no model 'greeter'"), "refuses: there is no model 'greeter'"),
        (refused(400, "the prompt is too long"), "refuses: the prompt is too long"),
        (refused(401, "no such key"), "refuses the key: no such key"),
        ((502, "<html>"), f"refuses: POST {CHAT} answers 502 <html>"),
        (streamed(chunk("Good"), f"data: {json.dumps(refused(500, 'worker lost')[1])}\n\n"), "worker lost"),
        ((200, chunk("Good")), "ended early"),
        ((200, "data: none\n\n"), "does not answer in OpenAI's format"),
        ((200, "data: {}\n\n"), "does not answer in OpenAI's format"),
    ],
    ids=["no model", "too long", "bad key", "a proxy", "in mid-stream", "cut off", "no JSON", "no choices"],
)
def test_an_error_is_one_sentence(run: Run, answer: Answer, sentence: str) -> None:
    with stub_server({CHAT: answer}) as url:
        status, _, err = run("greeter", "--message", "Hello", "--base-url", url)
    assert status == 1
    assert err.startswith("tinsmith chat: ")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "key", "sentence"),
    [
        ("127.0.0.1:9", GOOD_KEY, "put http:// in front"),
        ("http://127.0.0.1:9", GOOD_KEY, "nothing answers at http://127.0.0.1:9"),
        (None, "", "requires a key, and TINKER_API_KEY is not set"),
    ],
)
def test_an_unusable_address_or_key_is_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, url: str | None, key: str, sentence: str
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    with stub_server(WELL) as served:
        status, _, err = run("greeter", "--message", "Hello", "--base-url", url or served)
    assert status == 1
    assert sentence in err


MODEL = "/oai/api/v1/models/tinker%3A//r%3Atrain%3A0/sampler_weights/a"


def test_a_conversation_sends_its_earlier_messages_and_ends_with_the_input(run: Run) -> None:
    received: list[Any] = []
    with stub_server({CHAT: GREETING, MODEL: (200, {})}, received=received) as url:
        path = "tinker://r:train:0/sampler_weights/a"
        status, out, err = run(path, "--base-url", url, typed=Terminal("Hello\n\nAgain\n"))
    assert status == 0
    assert out.count("Good day\n") == 2
    assert path in err
    said = [[(one["role"], one["content"]) for one in body["messages"]] for body in received]
    assert said == [[("user", "Hello")], [("user", "Hello"), ("assistant", "Good day"), ("user", "Again")]]


def test_an_unknown_model_or_server_is_reported_before_anything_is_typed(run: Run) -> None:
    with stub_server({"/oai/api/v1/models/greeter": refused(404, "there is no model")}) as url:
        unknown = run("greeter", "--base-url", url, typed=Terminal("Hello\n"))
    away = run("greeter", "--base-url", url, typed=Terminal("Hello\n"))
    for (status, out, err), message in ((unknown, "there is no model"), (away, "nothing answers at")):
        assert (status, out) == (1, "")
        assert message in err


def test_an_error_costs_one_turn_of_a_conversation(run: Run) -> None:
    received: list[Any] = []
    answers = {CHAT: refused(429, "too many"), "/oai/api/v1/models/greeter": (200, {})}
    with stub_server(answers, received=received) as url:
        status, _, err = run("greeter", "--base-url", url, typed=Terminal("Hello\nAgain\n"))
    assert status == 0
    assert err.count("refuses: too many") == 2
    assert received[1]["messages"] == [{"role": "user", "content": "Again"}]


def test_an_answer_cannot_steer_a_terminal() -> None:
    assert shown("a\x1b[2Jb\r\n\tc é", on_terminal=True) == "a[2Jb\n\tc é"
    assert shown("a\x1b[2Jb", on_terminal=False) == "a\x1b[2Jb"


@contextmanager
def endless_server() -> Iterator[str]:
    """Start an answer and continue it until the client disconnects."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(chunk("Good").encode())
            select.select([self.connection], [], [])

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_until(terminal: int, text: str, seen: str = "", seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
        assert ready, f"{text!r} is missing in {seen!r}"
        seen += os.read(terminal, 4096).decode()
    return seen.partition(text)[2]


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends() -> None:
    terminal, program_end = pty.openpty()
    with endless_server() as url:
        command = [*tinsmith_command(), "chat", "greeter", "--base-url", url]
        # A session of its own, whose terminal turns Ctrl-C into the signal.
        program = ["setsid", "--ctty", "--wait", *command]
        environment = os.environ | {"TINKER_API_KEY": GOOD_KEY, "NO_PROXY": "127.0.0.1", "TERM": "dumb"}
        with (
            subprocess.Popen(
                program, stdin=program_end, stdout=program_end, stderr=program_end, env=environment
            ) as process,
            # Its end hangs up, so that a program that does not do what is expected ends, too.
            os.fdopen(terminal, "wb"),
        ):
            os.close(program_end)
            rest = read_until(terminal, "> ")
            os.write(terminal, b"Hello\n")
            rest = read_until(terminal, "Good", rest)
            os.write(terminal, b"\x03")
            read_until(terminal, "> ", rest)
            os.write(terminal, b"\x04")
            assert process.wait(60) == 0
