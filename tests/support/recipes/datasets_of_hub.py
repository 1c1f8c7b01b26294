"""The datasets that recipes load, with few rows of small sums: as the hub lays them out, or as files."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path

import pyarrow
import pyarrow.parquet
from PIL import Image
from support.recipes.names import (
    BENCHMARKS,
    CHAT_FILE,
    CONVERSATIONS,
    DEMONSTRATIONS,
    EXAMINATIONS,
    EXAMPLES,
    FORECASTS_FILE,
    HARD_PROBLEMS,
    MIXTURE,
    PHOTOS,
    PREFERENCES,
    REASONING,
    RUBRIC_FILE,
    RUBRIC_TEST_FILE,
    RUBRIC_TESTS,
    WORD_PROBLEMS,
)

Row = dict[str, object]
ROWS = 2048
"""The rows for a few steps at the default batch sizes of recipes."""
TEST_ROWS = 300
SPLIT_AT = date(2025, 10, 20)
FORECAST_DAYS = 16


def make_datasets(directory: Path) -> None:
    _save(directory / CONVERSATIONS, "default", train=_rows(_conversation, ROWS), test=_rows(_conversation, TEST_ROWS))
    _save(directory / PREFERENCES, "default", train=_rows(_preference, ROWS), test=_rows(_preference, 64))
    _save(directory / WORD_PROBLEMS, "main", train=_rows(_word_problem, 256), test=_rows(_word_problem, 32))
    _save(directory / HARD_PROBLEMS, "default", train=_rows(_hard_problem, 256))
    _save(directory / MIXTURE, "default", train=_rows(_conversation, 1200))
    _save(directory / REASONING, "default", train=_rows(_thought, 256))
    _save(directory / PHOTOS, "default", train=_photos(64), test=_photos(32))
    with (directory / CHAT_FILE).open("w") as file:
        file.writelines(json.dumps({"messages": _messages(*each)}) + "\n" for each in _sums(256))
    _save_forecasts(directory / FORECASTS_FILE)
    _save_to_disk(directory / DEMONSTRATIONS, [_demonstration(*each) for each in _sums(64)])
    _save_rubrics(directory / RUBRIC_FILE, 64)
    _save_rubrics(directory / RUBRIC_TEST_FILE, RUBRIC_TESTS)
    _save_benchmarks(directory / BENCHMARKS)


def _save(directory: Path, config: str, **splits: Sequence[Row] | pyarrow.Table) -> None:
    """Save a dataset repository in the hub's layout: parquet files, and a card that names their split."""
    directory.mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist([*rows])
        pyarrow.parquet.write_table(table, directory / f"{split}-00000-of-00001.parquet")
        card += [f"  - split: {split}", f"    path: {split}-*"]
    (directory / "README.md").write_text("\n".join([*card, "---", ""]))


def _photos(count: int) -> pyarrow.Table:
    """Make photos of one colour each, the name of its class. The schema describes the columns for `datasets`."""
    import datasets

    colours = ("red", "green", "blue")
    labels = [index % len(colours) for index in range(count)]
    columns = {"image": [Image.new("RGB", (48, 48), colours[label]) for label in labels], "label": labels}
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=[*colours]))
    return datasets.Dataset.from_dict(columns, features).data.table


def _save_to_disk(directory: Path, rows: Sequence[Row]) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list([*rows]).save_to_disk(directory)


def _save_rubrics(path: Path, count: int) -> None:
    """Scores are what brief models answer: a digit in a box."""
    rubric = {
        "rubric_str": "Is the sum right?",
        "extraction_regex": r"\\boxed\{(\d)\}",
        "grader_output_format_instruction": r"Say how right it is, from 1 to 9, as in \boxed{5}.",
    }
    with path.open("w") as file:
        for question, _answer in _sums(count):
            row = {"convo": [{"role": "user", "content": question}], "rubric_items": [rubric]}
            file.write(json.dumps(row) + "\n")


def _save_benchmarks(directory: Path) -> None:
    """Save the benchmarks of self-distillation: questions with four options, and uses of tools."""
    tools, science = directory / "tooluse_data", directory / "science_data"
    calls = [{"Action": "add", "Action_Input": "{}"}]
    _save_to_disk(tools / "train_data", [_demonstration(*each) for each in _sums(EXAMPLES)])
    _save_to_disk(tools / "eval_data", [{"prompt": each, "golden_answer": calls} for each, _ in _sums(EXAMINATIONS)])
    _save_to_disk(science / "train_data", [_reasoned(*each) for each in _sums(EXAMPLES)])
    examined = [{"prompt": _chat(question), "answer": "A"} for question, _ in _sums(EXAMINATIONS)]
    _save_to_disk(science / "eval_data", examined)


def _demonstration(question: str, answer: int) -> Row:
    return {"prompt": question, "golden_response": [f"It is {answer}."]}


def _reasoned(question: str, answer: int) -> Row:
    text = f"<reasoning>\nIt is {answer}.\n</reasoning>\n<answer>\nA\n</answer>"
    return {"messages": _chat(question), "output_text": text}


def _chat(question: str) -> list[Row]:
    return [{"role": "system", "content": "Choose A, B, C or D."}, {"role": "user", "content": question}]


def _save_forecasts(path: Path) -> None:
    """One market a day, for as long before the day at which recipes split them as after it."""
    sources = json.dumps([{"title": "Almanac", "summary": "It rained on the day before.", "ranking": 1}])
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, FORECAST_COLUMNS)
        rows.writeheader()
        for index in range(2 * FORECAST_DAYS):
            day = SPLIT_AT + timedelta(days=index - FORECAST_DAYS)
            market = f"It rains on {day:%d %B}"
            rows.writerow(
                {
                    "submission_id": str(index),
                    "event_ticker": f"RAIN-{index}",
                    "title": "Will it rain?",
                    "snapshot_time": f"{day}T00:00:00Z",
                    "close_time": f"{day}T12:00:00Z",
                    "market_outcome": json.dumps({market: index % 2}),
                    "category": "Weather",
                    "markets": json.dumps([market]),
                    "sources": sources,
                }
            )


FORECAST_COLUMNS = (
    *("submission_id", "event_ticker", "title", "snapshot_time", "close_time"),
    *("market_outcome", "category", "markets", "sources"),
)


def _rows(make: Callable[[int, str, int], Row], count: int) -> list[Row]:
    return [make(index, *each) for index, each in enumerate(_sums(count))]


def _messages(question: str, answer: int) -> list[Row]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {answer}."}]


def _conversation(index: int, question: str, answer: int) -> Row:
    messages = _messages(question, answer)
    return {"prompt": question, "prompt_id": str(index), "category": "Chat", "messages": messages}


def _preference(_index: int, question: str, answer: int) -> Row:
    return {
        "chosen": f"\n\nHuman: {question}\n\nAssistant: It is {answer}.",
        "rejected": f"\n\nHuman: {question}\n\nAssistant: No idea at all, sorry.",
    }


def _word_problem(_index: int, question: str, answer: int) -> Row:
    return {"question": question, "answer": f"It is {answer}.\n#### {answer}"}


def _hard_problem(_index: int, question: str, answer: int) -> Row:
    return {"question": question, "final_answer": str(answer)}


def _thought(_index: int, question: str, answer: int) -> Row:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": f"It is {answer}."}]}


def _sums(count: int) -> Iterator[tuple[str, int]]:
    draw = random.Random(count)
    for _ in range(count):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        name = draw.choice(("Ada", "Bob", "Cleo", "Dan", "Eve"))
        yield f"{name} has {a} apples and buys {b} more. How many apples are there?", a + b
