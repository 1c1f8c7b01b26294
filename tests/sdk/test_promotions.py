"""A stable name, by the command, by the library, and by OpenAI's own client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from openai import NotFoundError, OpenAI
from support.client.sdk import adam, next_token_datum, service_client
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith.cli import main
from tinsmith.local_server import tinsmith_command
from tinsmith.training import promote, promotion_history, promotions, remove_promotion, rollback
from tinsmith.training.errors import PromotionRefused

from .conftest import MODEL

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def saved(server: ServedInstallation) -> list[str]:
    """Return the paths of two samplers with different answers: each has learned to repeat another token.

    The seed is fixed, and each is trained until its loss is below 0.01, because other starts leave answers to chance.
    """
    with service_client(server) as client:
        return [trained_to_repeat(client, token) for token in (7, 11)]


def trained_to_repeat(client: tinker.ServiceClient, token: int) -> str:
    model = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
    for _ in range(10):
        model.forward_backward([next_token_datum([token] * 12)], "cross_entropy")
        model.optim_step(adam(2e-2)).result()
    return model.save_weights_for_sampler(f"repeats-{token}").result().path or ""


@pytest.fixture
def service(server: ServedInstallation) -> Iterator[tinker.RestClient]:
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    yield rest
    for one in promotions(service=rest):
        remove_promotion(one.name, service=rest)


@pytest.fixture(autouse=True)
def environment(server: ServedInstallation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)


def client_of(server: ServedInstallation, key: str = API_KEY) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=key, max_retries=0)


def answered(client: OpenAI, model: str) -> str:
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=12, temperature=0)  # type: ignore[call-overload]
    assert answer.model == model
    return str(answer.choices[0].message.content)


def run_promote(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["promote", *arguments])
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


def how_to_use(name: str, server: ServedInstallation) -> str:
    return f"Talk to it: tinsmith chat {name}\nOpenAI clients: base URL {server.url}/v1, model {name}\n"


@pytest.mark.usefixtures("service")
def test_programs_that_know_a_name_get_the_next_adapter_and_the_former_one_again(
    server: ServedInstallation, saved: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = saved
    with client_of(server) as client:
        says = {path: answered(client, path) for path in saved}
        assert says[first] != says[second]
        for path in saved:
            told = f"assistant stands for {path}\n{how_to_use('assistant', server)}"
            assert run_promote(capsys, "assistant", path) == (0, told, "")
            assert answered(client, "assistant") == says[path]
        assert run_promote(capsys, "assistant", "--rollback") == (0, f"assistant stands for {first}\n", "")
        assert answered(client, "assistant") == says[first]
        assert "assistant" in [model.id for model in client.models.list()]
        command = [*tinsmith_command(), "keys", "create", "theirs", "--tenant=another", f"--data={server.data}"]
        key = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        with client_of(server, key) as others, pytest.raises(NotFoundError, match="there is no model 'assistant'"):
            answered(others, "assistant")


def test_the_library_promotes_and_says_what_there_is(service: tinker.RestClient, saved: list[str]) -> None:
    first, second = saved
    assert promote("prod", first, expected=None, service=service).number == 1
    with pytest.raises(PromotionRefused, match=f"prod now refers to {first}, not to {second}"):
        promote("prod", second, expected=second, service=service)
    promote("prod", second, expected=first, service=service)
    assert rollback("prod", service=service).path == first
    assert [(one.name, one.path) for one in promotions(service=service)] == [("prod", first)]
    made = [(one.path, one.is_rollback) for one in promotion_history("prod", service=service)]
    assert made == [(first, True), (second, False), (first, False)]
    with pytest.raises(tinker.UnprocessableEntityError, match="prod refers to"):
        service.delete_checkpoint_from_tinker_path(first).result()
    remove_promotion("prod", service=service)
    for ask in (rollback, promotion_history, remove_promotion):
        with pytest.raises(PromotionRefused, match="you have no promoted name prod"):
            ask("prod", service=service)
    for name in ("a/b", "a b"):
        with pytest.raises(PromotionRefused, match="is not a valid name"):
            promote(name, first, service=service)


@pytest.mark.usefixtures("service")
def test_the_sampler_of_a_run_is_promoted_by_its_folder_and_a_terminal_talks_to_it(
    server: ServedInstallation, saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"sampler": saved[1]}))
    told = f"assistant stands for {saved[1]}\n{how_to_use('assistant', server)}"
    assert run_promote(capsys, "assistant", "--run", str(tmp_path)) == (0, told, "")
    with client_of(server) as client:
        expected = answered(client, "assistant")
    for model in ("assistant", saved[1]):
        with pytest.raises(SystemExit) as end:
            main(["chat", model, "--message", "Hello", "--max-tokens", "12", "--temperature", "0"])
        assert end.value.code == 0
        assert capsys.readouterr().out == f"{expected}\n"
    status, _, err = run_promote(capsys, "assistant", "--run", str(tmp_path / "none"), "--expect", "x")
    assert (status, "has no summary.json" in err) == (1, True)
