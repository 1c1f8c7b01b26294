"""The console in Chromium, with a server and programs of the SDK: what people see, change, and can read."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import pytest
import tinker
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from support.client.sdk import adam, next_token_datum, service_client
from support.requirements import InstalledBy, require
from support.server.serve_process import API_KEY, ServedInstallation
from tinker import types
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
AXE = ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = ROOT / "docs" / "images" / "console"
MODEL = "Qwen/Qwen3-8B"
WIDE, NARROW = 1440, 380
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
"""Chromium must load nothing from other machines."""
PICTURED = {"runs": {"light-1440", "dark-1440", "light-380"}, "run": {"light-1440", "dark-1440", "dark-380"}}
"""The pictures that are kept of a screen. Of other screens, one picture is kept."""
STEPS = 60
QUESTION = "When does tin melt?"
ANSWERS = ("Tin melts at 232 degrees.", "Tin melts in a hot pan.")
RATES = (6e-3, 4e-3)
EVALUATED_EVERY = 5
# With one worker of three places, the fourth model waits.
SETTINGS = {"adapter_slots": "2", "model_places": "3", "places_for_others": "0"}


@dataclass(frozen=True)
class Trained:
    """Two runs of one session, and what they have saved."""

    runs: tuple[str, str]
    samplers: tuple[str, str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    folder = tmp_path_factory.mktemp("console")
    installation = ServedInstallation(folder / "data", {MODEL: make_tiny_model(folder / "model")}, SETTINGS)
    installation.start()
    for name, role in (("laptop", "admin"), ("wall display", "reader")):
        answer = installation.post("/api/v1/keys", {"tenant": "default", "name": name, "role": role})
        assert answer.status_code == httpx.codes.OK
    yield installation
    installation.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    require(chromium is not None, "Chromium is not installed.", InstalledBy.DEBIAN_PACKAGES)
    require(AXE.is_file(), "axe-core is not installed.", InstalledBy.CONSOLE_PACKAGES)
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def session(browser: Browser, server: ServedInstallation) -> Iterator[BrowserContext]:
    """Yield a browser that is logged in with an administrator's key."""
    context = browser.new_context(viewport={"width": WIDE, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    log_in(page, server, API_KEY)
    page.close()
    yield context
    context.close()


@pytest.fixture
def page(session: BrowserContext, server: ServedInstallation) -> Iterator[Page]:
    """Yield a page of the session. A script or style that the server's policy forbids is an error of the page."""
    page = session.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    page.goto(f"{server.url}/console/")
    yield page
    page.close()
    assert errors == []


@pytest.fixture(scope="module")
def trained(server: ServedInstallation) -> Iterator[Trained]:
    """Train two adapters with different answers to one question, and let a third model wait for a place."""
    with service_client(server, display_name="Melting points") as client:
        (first, one), (second, other) = [
            train(server, client, answer, rate) for answer, rate in zip(ANSWERS, RATES, strict=True)
        ]
        for _ in range(2):
            body = {"base_model": MODEL, "lora_config": {"rank": 8}}
            assert server.post("/api/v1/create_model", body).status_code == httpx.codes.OK
        yield Trained((first, second), (one, other))


def train(server: ServedInstallation, client: tinker.ServiceClient, answer: str, rate: float) -> tuple[str, str]:
    metadata = {"tinsmith-total-steps": "100", "learning_rate": str(rate), "data": answer}
    model = client.create_lora_training_client(MODEL, rank=8, seed=1, user_metadata=metadata).result()
    run = model.get_info().model_id
    datum = answer_datum(server.models[MODEL], answer)
    for step in range(1, STEPS + 1):
        done = model.forward_backward([datum], "cross_entropy")
        model.optim_step(adam(rate * (1 - step / 100))).result()
        if step % EVALUATED_EVERY == 0:
            loss = done.result().metrics["loss:sum"]
            values = {"eval/answer_loss": loss, "eval/likelihood": math.exp(-loss / 10)}
            report = {"metrics": [{"step": step, "values": values}]}
            assert server.post(f"/api/v1/training_runs/{run}/metrics", report).status_code == httpx.codes.OK
    model.save_state(f"step-{STEPS}").result()
    return run, model.save_weights_for_sampler("final").result().path or ""


def answer_datum(model: Path, answer: str) -> types.Datum:
    """Make a datum for the answer to the question, as the chat template writes a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
    tokens = [*prompt, *tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},  # type: ignore[dict-item]
    )


def log_in(page: Page, server: ServedInstallation, key: str) -> None:
    page.goto(f"{server.url}/console/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Runs", level=1)).to_be_visible()


def show(page: Page, hash_: str, heading: str) -> None:
    page.evaluate("hash => location.hash = hash", hash_)
    expect(page.get_by_role("heading", name=heading, level=1)).to_be_visible()


def answer_dialog(page: Page, action: str) -> None:
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=action, exact=True).click()
    expect(dialog).to_be_hidden()


def test_a_wrong_key_is_refused_in_the_servers_words(browser: Browser, server: ServedInstallation) -> None:
    with browser.new_context(viewport={"width": WIDE, "height": 900}) as context:
        page = context.new_page()
        page.goto(f"{server.url}/")
        page.get_by_label("API key").fill("tml-wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("Log in again with a valid key.")
        expect(page.get_by_label("API key")).to_be_focused()
        check_for_everyone(page, "login")
        log_in(page, server, API_KEY)
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])").find(API_KEY) == -1
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("API key")).to_be_visible()


def test_a_curve_grows_while_a_program_trains(page: Page, server: ServedInstallation) -> None:
    with service_client(server) as client:
        metadata = {"tinsmith-total-steps": "4"}
        model = client.create_lora_training_client(MODEL, rank=2, user_metadata=metadata).result()
        run = model.get_info().model_id
        row = page.get_by_role("row").filter(has=page.locator(f'a[href*="{run.replace(":", "%3A")}"]'))
        row.get_by_role("link").first.click()
        expect(page.get_by_text("There are no points yet.")).to_be_visible()
        for step in (1, 2, 3):
            model.forward_backward([next_token_datum([5] * 12)], "cross_entropy")
            model.optim_step(adam()).result()
            points = re.compile(rf"Loss: {step} points from step 1 to {step}\.")
            expect(page.get_by_role("img", name=points)).to_be_visible()
        expect(page.get_by_text("3 of 4")).to_be_visible()


def test_runs_are_compared_in_the_same_charts(page: Page, trained: Trained) -> None:
    for run in trained.runs:
        link = page.locator(f'a[href*="{run.replace(":", "%3A")}"]')
        page.get_by_role("row").filter(has=link).get_by_role("checkbox").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.get_by_role("list", name="Compared runs").get_by_role("listitem")).to_have_count(2)
    both = re.compile(rf"{STEPS} points.*{STEPS} points")
    reported = re.compile(rf"{STEPS // EVALUATED_EVERY} points.*{STEPS // EVALUATED_EVERY} points")
    for title, points in (("Loss", both), ("eval/likelihood", reported)):
        expect(page.get_by_role("figure").filter(has_text=title).get_by_role("img", name=points)).to_be_visible()
    differing = page.get_by_role("region", name="Settings that differ")
    expect(differing.get_by_role("row", name="learning_rate 0.006 0.004")).to_be_visible()
    expect(differing.get_by_role("row", name="LoRA rank")).to_have_count(0)


def ask_both(page: Page, trained: Trained) -> None:
    show(page, "#/playground", "Playground")
    for label, path in zip(("Left model", "Right model"), trained.samplers, strict=True):
        page.get_by_label(label).fill(path)
    page.get_by_label("Prompt", exact=True).fill(QUESTION)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("40")
    page.get_by_role("button", name="Run").click()
    for path in trained.samplers:
        answer = page.get_by_role("region", name=f"Answer of {path}")
        expect(answer.get_by_text("complete")).to_be_visible()


def test_two_adapters_answer_one_prompt_side_by_side(page: Page, trained: Trained) -> None:
    ask_both(page, trained)
    assert page.get_by_role("log").all_inner_texts() == list(ANSWERS)


def test_a_long_answer_is_stopped(page: Page) -> None:
    show(page, f"#/playground?left={MODEL}", "Playground")
    page.get_by_label("Prompt", exact=True).fill(QUESTION)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("8000")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("log")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped")).to_be_visible()


def test_a_sampler_is_promoted_and_rolled_back_after_a_question(page: Page, trained: Trained) -> None:
    show(page, "#/checkpoints", "Checkpoints")
    names = page.get_by_role("table", name="Promoted names")
    for run, path in zip(trained.runs, trained.samplers, strict=True):
        page.get_by_label("Filter").fill(run)
        page.get_by_role("button", name="Promote sampler_weights/final").click()
        page.get_by_role("dialog").get_by_label("Name").fill("assistant")
        answer_dialog(page, "Promote")
        expect(names.get_by_role("row", name="assistant")).to_contain_text(path)
    names.get_by_role("button", name="Roll back assistant").click()
    answer_dialog(page, "Roll back")
    expect(names.get_by_role("row", name="assistant")).to_contain_text(trained.samplers[0])


def test_an_error_stays_in_the_dialog_with_what_to_do(page: Page, trained: Trained) -> None:
    show(page, "#/checkpoints", "Checkpoints")
    page.get_by_label("Filter").fill(trained.runs[0])
    page.get_by_role("button", name="Promote sampler_weights/final").click()
    page.get_by_role("dialog").get_by_label("Name").fill("no name")
    page.get_by_role("dialog").get_by_role("button", name="Promote", exact=True).click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("is not a valid name")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Promote sampler_weights/final")).to_be_focused()


def test_a_key_works_until_it_is_revoked(browser: Browser, page: Page, server: ServedInstallation) -> None:
    show(page, "#/keys", "Keys and tenants")
    page.get_by_label("Name", exact=True).fill("visitor")
    page.get_by_label("Role").select_option("reader")
    page.get_by_role("button", name="Create", exact=True).click()
    key = page.locator("form code").inner_text()
    page.get_by_role("button", name="I have copied it").click()
    expect(page.locator("form code")).to_have_count(0)
    with browser.new_context() as other:
        visitor = other.new_page()
        log_in(visitor, server, key)
        show(visitor, "#/checkpoints", "Checkpoints")
        expect(visitor.get_by_text("which may only look")).to_be_visible()
        expect(visitor.get_by_role("button", name="Delete")).to_have_count(0)
        expect(visitor.get_by_role("link", name="Keys and tenants")).to_have_count(0)
        show(visitor, f"#/playground?left={MODEL}", "Playground")
        visitor.get_by_label("Prompt", exact=True).fill(QUESTION)
        expect(visitor.get_by_role("button", name="Run")).to_be_disabled()
        page.get_by_role("button", name="Revoke visitor").click()
        answer_dialog(page, "Revoke")
        visitor.get_by_role("link", name="Usage").click()
        expect(visitor.get_by_text("The session has ended.")).to_be_visible()


def test_a_lost_connection_is_announced_until_the_missed_answer_has_come(page: Page, session: BrowserContext) -> None:
    show(page, "#/usage", "Usage")
    session.set_offline(True)
    try:
        page.get_by_label("Time").select_option("last week")
        expect(page.get_by_text("The server does not answer.")).to_be_visible()
    finally:
        with page.expect_response("**/billing/usage/events*"):
            session.set_offline(False)
    expect(page.get_by_text("The server does not answer.")).to_have_count(0)


def screens(page: Page, trained: Trained) -> Iterator[str]:
    """Open each screen, and yield its name when it has its first answers."""
    run = trained.runs[1].replace(":", "%3A")
    addresses = {
        "runs": ("#/runs", "Runs"),
        "run": (f"#/run/{run}", "Melting points"),
        "compare": (f"#/compare?runs={','.join(trained.runs)}", "Comparison"),
        "waiting": ("#/waiting", "Waiting"),
        "checkpoints": ("#/checkpoints", "Checkpoints"),
        "usage": ("#/usage", "Usage"),
        "workers": ("#/workers", "Workers"),
        "keys": ("#/keys", "Keys and tenants"),
        "connect": ("#/connect", "Connect"),
    }
    for name, (hash_, heading) in addresses.items():
        show(page, hash_, heading)
        expect(page.locator("main[data-calls='0']")).to_be_visible()
        yield name
    ask_both(page, trained)
    yield "playground"


def check_for_everyone(page: Page, name: str) -> None:
    """Check that axe finds no fault, and that nothing is wider than the window."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)")
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found] == [], name
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


def looks(page: Page) -> Iterator[str]:
    """Give the page each theme and each width, and yield the name of the look when it is drawn."""
    for width, height in ((NARROW, 800), (WIDE, 900)):
        page.set_viewport_size({"width": width, "height": height})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            yield f"{scheme}-{width}"


def test_every_screen_is_for_everyone_in_each_theme_at_each_width(page: Page, trained: Trained) -> None:
    for name in screens(page, trained):
        for look in looks(page):
            check_for_everyone(page, f"{name} {look}")
            if os.environ.get("TINSMITH_PICTURES") == "write" and look in PICTURED.get(name, {"light-1440"}):
                save_picture(page, PICTURES / f"{name}-{look}.png")


@pytest.mark.parametrize("opener", ["Use", "Delete"])
def test_a_dialog_is_for_everyone(page: Page, trained: Trained, opener: str) -> None:
    show(page, "#/checkpoints", "Checkpoints")
    page.get_by_role("button", name=f"{opener} sampler_weights/final").first.click()
    for look in looks(page):
        check_for_everyone(page, look)


def save_picture(page: Page, file: Path) -> None:
    """Write a small picture: few colours suffice for a page."""
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)
