"""`aflow-tune data`: splits with exact counts, nothing shared, nothing overwritten; the check."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_project import write_rows

from aflow_tune.cli import main

SIZES = ["--train", "20", "--validation", "4", "--test", "4"]
SUBJECTS = ["apples", "pears", "plums", "figs", "dates", "limes", "nuts", "beans", "leeks", "peas"]
VERBS = [
    "buys",
    "sells",
    "paints",
    "counts",
    "weighs",
    "throws",
    "washes",
    "finds",
    "hides",
    "draws",
    "eats",
    "loses",
]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def sums(count: int) -> list[dict[str, Any]]:
    """Questions no two of which are similar."""
    return [
        {
            "question": f"Person{n} {VERBS[n % 12]} {n + 2} {SUBJECTS[n % 10]} beside house{n} "
            f"and {VERBS[n * 7 % 12]} {n * n} {SUBJECTS[n * 3 % 10]}{n}. How many?",
            "answer": f"#### {n}",
        }
        for n in range(count)
    ]


def prepare(out: Path, *words: str | Path) -> int:
    return main(["data", "prepare", "--out", str(out), *map(str, words)])


def test_the_seed_decides_and_nothing_else(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", sums(60))
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert prepare(tmp_path / name, f"--source=gsm8k={file}", *SIZES, "--seed", seed) == 0
    names = ["train.jsonl", "validation.jsonl", "test.jsonl", "manifest.json"]
    a, b, c = ([(tmp_path / run / name).read_bytes() for name in names] for run in "abc")
    assert a == b
    assert not {*a} & {*c}


def test_what_is_nearly_the_same_never_stands_on_both_sides(tmp_path: Path) -> None:
    """Forty problems, each in three wordings."""
    rows = sums(40)
    for row in list(rows):
        rows.append({**row, "question": row["question"].replace(" How many?", " How many then?")})
        rows.append({**row, "question": row["question"].replace(".", "").upper()})
    file = write_rows(tmp_path / "rows.jsonl", [*rows, rows[0]])
    out = tmp_path / "out"
    assert prepare(out, f"--source=gsm8k={file}", *SIZES) == 0
    found = {name: read_lines(out / f"{name}.jsonl") for name in ("train", "validation", "test")}
    persons = {
        name: {row["question"].split()[0].lower() for row in split} for name, split in found.items()
    }
    assert persons["test"].isdisjoint(persons["train"] | persons["validation"])
    assert persons["validation"].isdisjoint(persons["train"])
    assert [len(found[name]) for name in ("train", "validation", "test")] == [20, 4, 4]
    (about,) = json.loads((out / "manifest.json").read_text())["sources"]
    assert (about["rows"], about["duplicates"]) == (121, 1)
    assert about["near_duplicates_of_held_out"] > 0
    assert prepare(tmp_path / "more", f"--source=gsm8k={file}", "--train", "112", *SIZES[2:]) == 2


def test_files_are_never_overwritten_without_being_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", sums(40))
    (tmp_path / "test.jsonl").write_text("mine\n")
    words = [f"--source=gsm8k={file}", *SIZES]
    assert prepare(tmp_path, *words) == 2
    assert f"{tmp_path}/test.jsonl" in capsys.readouterr().err
    assert (tmp_path / "test.jsonl").read_text() == "mine\n"
    assert not (tmp_path / "train.jsonl").exists()
    assert prepare(tmp_path, *words, "--force") == 0
    assert len(read_lines(tmp_path / "test.jsonl")) == 4


def test_shares_of_sources_of_ones_own(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", sums(30))
    second = write_rows(tmp_path / "b.jsonl", [{"q": f"b{n}", "source": "web"} for n in range(30)])
    words = [f"--source=mine={first}", f"--source=other={second}", *SIZES]
    ratios = ["--ratio=mine=0.75", "--ratio=other=0.25", "--benchmark=mine=gsm8k"]
    assert prepare(tmp_path / "out", *words, *ratios) == 0
    train = read_lines(tmp_path / "out" / "train.jsonl")
    assert Counter(row["source"] for row in train) == {"mine": 15, "other": 5}
    assert {row["benchmark"] for row in train} == {"gsm8k", "other"}
    assert {row["original_source"] for row in train if row["source"] == "other"} == {"web"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--source=gsm8k=nowhere.jsonl"], "no such file"),
        (["--source=gsm8k=b.jsonl"], "the fields of gsm8k"),
        (["--source=gsm9k"], "--source gsm9k"),
        (["--source=x=b.jsonl", "--benchmark=x=gsm9k"], "gsm8k"),
        (["--source=x=b.jsonl", "--ratio=y=1"], "--ratio y"),
        (["--source=x=b.jsonl", "--ratio=x=0.4"], "0.4"),
        (["--source=gsm8k=a.jsonl", "--train=90", *SIZES[2:]], "--train 27 --validation 1"),
        (["--source=x=torn.jsonl"], "torn.jsonl:2"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", sums(30))
    write_rows(tmp_path / "b.jsonl", [{"q": "b"}])
    (tmp_path / "torn.jsonl").write_text('{"q": 1}\n{"q": \n')
    assert prepare(tmp_path / "out", *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_check_names_both_places_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = sums(12)
    train = write_rows(tmp_path / "train.jsonl", rows[:6])
    near = {"question": rows[2]["question"] + " Say it."}
    test = write_rows(tmp_path / "test.jsonl", [rows[7], rows[4], near])
    clean = write_rows(tmp_path / "clean.jsonl", rows[8:])
    assert main(["data", "check", str(train), str(clean)]) == 0
    assert "0 of 4 rows leak" in capsys.readouterr().out
    assert main(["data", "check", str(train), str(clean), str(test)]) == 2
    output = capsys.readouterr().out.splitlines()
    assert output[1] == f"{test}:2: the same as {train}:5"
    assert output[2].startswith(f"{test}:3: 0.")
    assert output[2].endswith(f"similar to {train}:3")
    assert output[3] == f"{test}: 2 of 3 rows leak (1 equal, 1 nearly)"
