"""Files of examples: valid lines, and the errors of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tinsmith.training.errors import TaskFileError
from tinsmith.training.evaluation.loading import TaskOptions, find_tasks, load_task
from tinsmith.training.evaluation.tasks import ChoiceTask, Task

pytestmark = pytest.mark.pytorch

GOOD = {"prompt": "1 + 1", "answer": "2"}
CHOOSING = {"prompt": "1 + 1", "answer": 0, "choices": ["2", "3"]}
MODULE = """
from tinsmith.training import Example, Task

def grade(example, answer):
    return 1.0

one = Task("one", [Example([1])], grade, tokenizer=False)
two = [one, Task("two", [Example([1])], grade, tokenizer=False)]

def made():
    return two

number = 3
"""


def file_of(folder: Path, *rows: object) -> Path:
    path = folder / "sums.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_line_is_an_example(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1"}]
    path = file_of(tmp_path, GOOD, "", {"messages": messages, "answer": 2, "id": "two"}, {"prompt": [1], "answer": "x"})
    task = load_task(path)
    assert (type(task), task.name) == (Task, "sums")
    assert [(one.id, one.prompt, one.answer) for one in task.examples] == [
        ("0", "1 + 1", "2"),
        ("two", messages, 2),
        ("2", [1], "x"),
    ]
    assert len(load_task(path, TaskOptions(limit=2)).examples) == 2


@pytest.mark.parametrize(
    ("row", "grader", "sentence"),
    [
        ("{", None, "no JSON"),
        ([1], None, "an object with prompt"),
        ({"answer": "2"}, None, "either prompt or messages"),
        (GOOD | {"messages": []}, None, "either prompt or messages"),
        ({"prompt": "1 + 1"}, None, "answer is missing"),
        (GOOD | {"anwser": "2"}, None, "unknown key anwser"),
        (GOOD | {"prompt": [1, -2]}, None, "a text or a list of tokens"),
        (GOOD | {"prompt": [True]}, None, "a text or a list of tokens"),
        ({"messages": [{"role": "user"}], "answer": ""}, None, "role and content"),
        ({"messages": [], "answer": ""}, None, "role and content"),
        (GOOD | {"choices": "ab"}, None, "choices must be a list of texts"),
        (CHOOSING | {"answer": 2}, None, "not one of its choices"),
        (GOOD, "choice", "0 choices"),
        (GOOD | {"answer": "two"}, "number", "is not a number"),
        (GOOD | {"answer": "("}, "regex", "is not a valid pattern"),
        (GOOD | {"answer": None}, "exact", "must be a text"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, row: object, grader: str | None, sentence: str) -> None:
    path = file_of(tmp_path, CHOOSING if grader is None else GOOD | {"answer": "2"}, row)
    if grader == "choice":
        path = file_of(tmp_path, CHOOSING, row)
    with pytest.raises(TaskFileError, match=rf"sums\.jsonl:2: .*{sentence}"):
        load_task(path, TaskOptions(grader=grader))


def test_a_file_as_a_whole_may_be_wrong(tmp_path: Path) -> None:
    twice = file_of(tmp_path, GOOD | {"id": "a"}, GOOD | {"id": "a"})
    with pytest.raises(TaskFileError, match=r"sums\.jsonl: two examples have the id a"):
        load_task(twice)
    with pytest.raises(TaskFileError, match="at least one example"):
        load_task(file_of(tmp_path, ""))
    with pytest.raises(TaskFileError, match="cannot be read"):
        load_task(tmp_path / "nowhere.jsonl")
    with pytest.raises(
        TaskFileError, match="there is no grader best; use one of exact, contains, number, regex, choice"
    ):
        load_task(file_of(tmp_path, GOOD), TaskOptions(grader="best"))


def test_tasks_are_found_by_the_names_of_things_in_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    (tmp_path / "tasks_of_a_test.py").write_text(MODULE)
    found = {name: [task.name for task in find_tasks(f"tasks_of_a_test:{name}")] for name in ("one", "two", "made")}  # type: ignore[attr-defined]
    assert found == {"one": ["one"], "two": ["one", "two"], "made": ["one", "two"]}
    for wrong, sentence in (("tasks_of_a_test:none", "none"), ("no_such_module:x", "No module"), (":x", "Empty")):
        with pytest.raises(TaskFileError, match=sentence):
            find_tasks(wrong)
    with pytest.raises(TaskFileError, match="has type int; it must be a task"):
        find_tasks("tasks_of_a_test:number")


def test_examples_with_choices_are_a_choice_task_unless_a_grader_is_named(tmp_path: Path) -> None:
    assert isinstance(load_task(file_of(tmp_path, CHOOSING)), ChoiceTask)
    assert isinstance(load_task(file_of(tmp_path, CHOOSING), TaskOptions(grader="exact")), Task)
