"""Catalogues of every form; BM25, loss and nDCG by hand; a retriever that learns; the operator."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from graph_samples import simple
from tiny import tiny_sampler
from word_model import KINDS, asked_of, tools_of_words, write_word_model

from aflow_tune.data.catalogue import words_of
from aflow_tune.engines.local.models import load_tokenizer
from aflow_tune.engines.local.server import SamplerServer
from aflow_tune.errors import BadInput
from aflow_tune.graph.graph import Graph
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import Custom
from aflow_tune.retrieval import Asked, RetrieveTools, Tool, ToolIndex, read_asked, read_catalogue
from aflow_tune.retrieval.bm25 import BM25
from aflow_tune.retrieval.encoder import Encoder, summed
from aflow_tune.retrieval.measures import bootstrap, held_out, measure, ndcg
from aflow_tune.retrieval.training import Schedule, fit, hard_negatives, info_nce

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FLAT = {"city": {"type": "str"}}
WEATHER = {"name": "get_weather", "description": "The weather of a city."}
SAGE = {
    "tool_id": "weather_query_001",
    "name": "Weather",
    "category": "environment",
    "capabilities": ["forecast", "rain"],
    "inputs": [{"name": "city", "type": "string", "required": True, "description": "where"}],
    "description": "The weather of a city.",
}
SEAL = {
    "api_name": "getWeather",
    "api_description": "The weather of a city.",
    "field": "Nature",
    "parameters": FLAT,
    "required": ["city"],
}
FORMS: dict[str, tuple[str, Any]] = {
    "plain": ("get_weather", {**WEATHER, "parameters": CITY}),
    "openai": ("get_weather", {"type": "function", "function": {**WEATHER, "parameters": CITY}}),
    "bfcl": ("get_weather", {"id": "simple_0", "question": [], "function": [
        {**WEATHER, "parameters": {**CITY, "type": "dict"}}]}),
    "dialogue": ("get_weather", {"messages": [], "tools": json.dumps(
        [{**WEATHER, "parameters": CITY}])}),
    "xlam": ("get_weather", {"query": "?", "tools": [
        {**WEATHER, "parameters": {"city": {"type": "str", "required": True}}}]}),
    "mcp": ("get_weather", {**WEATHER, "inputSchema": CITY}),
    "sage": ("weather_query_001", SAGE),
    "seal": ("getWeather", SEAL),
}  # fmt: skip


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_catalogues_of_every_form(form: str, tmp_path: Path) -> None:
    name, row = FORMS[form]
    (tool,) = read_catalogue(written(tmp_path / "tools.jsonl", row))
    assert (tool.name, tool.description) == (name, WEATHER["description"])
    city = tool.parameters["properties"]["city"]
    assert (tool.parameters["type"], city["type"]) == ("object", "string")
    assert "required" not in city
    assert tool.parameters["required"] == ["city"]
    assert tool.to_openai()["function"]["parameters"] == tool.parameters
    assert {"weather", "city"} <= set(re.findall(r"\w+", words_of(tool.text).lower()))
    if form == "sage":
        assert all(word in tool.text for word in ("environment", "forecast", "Weather"))


def test_an_object_of_descriptions_and_a_list_and_a_repeated_name(tmp_path: Path) -> None:
    path = tmp_path / "plugin_des.json"
    path.write_text(json.dumps({"NewsTool": "News.", "MapTool": "Maps."}, indent=2))
    assert [(one.name, one.description) for one in read_catalogue(path)] == [
        ("NewsTool", "News."),
        ("MapTool", "Maps."),
    ]
    path.write_text(json.dumps([WEATHER, {**WEATHER, "description": "Another."}, SEAL]))
    assert [one.description for one in read_catalogue(path)] == [WEATHER["description"]] * 2


@pytest.mark.parametrize(
    ("line", "place", "found"),
    [
        ('{"description": "no name"}', ":2", "no name (description)"),
        ('{"name": 3}', ":2", "the name 3"),
        ('{"name": "a", "description": ["x"]}', ":2", "a list"),
        ('{"name": "a", "parameters": [1]}', ":2", "parameters of an unknown form"),
        ('{"name": "a", "parameters": {"type": "object", "properties": []}}', ":2", "form ([])"),
        ('{"name": "a", "inputs": [{"type": "string"}]}', ":2", "form ('name')"),
        ('{"name": "a", "parameters": {"x": 3}}', ":2", "form (3)"),
        ('{"tools": "[{"}', ":2", "Expecting"),
        ('{"name": "a"', ":2", "column"),
    ],
)
def test_a_faulty_row_is_named_with_its_line(
    line: str, place: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps(WEATHER) + "\n" + line + "\n")
    with pytest.raises(BadInput) as told:
        read_catalogue(path)
    (fault,) = told.value.faults
    assert fault.where == f"{path}{place}"
    assert found in fault.found


def test_one_broken_object_is_told_at_the_line_that_breaks_it(tmp_path: Path) -> None:
    path = tmp_path / "des.json"
    path.write_text('{\n  "NewsTool": "News.",\n  "MapTool" "Maps."\n}')
    with pytest.raises(BadInput, match=r"des.json:3\n.*JSON\n.*':' delimiter at column 13"):
        read_catalogue(path)
    path.write_text('{"name": "a"}\n{"name": "b"}\n')  # JSON lines under that name
    assert [tool.name for tool in read_catalogue(path)] == ["a", "b"]


def test_parameters_become_a_schema(tmp_path: Path) -> None:
    """Types by Python's names, texts instead of schemas, nulls, a schema without its type."""
    flat = {
        "a": {"type": "List[int]", "required": True},
        "b": "str, optional",
        "c": {"type": "any"},
    }
    bare = {
        "properties": {"a": {"type": "dict", "properties": {"x": {"type": "float"}}}, "b": None}
    }
    rows = [{"name": n, "parameters": given} for n, given in (("flat", flat), ("bare", bare))]
    found = read_catalogue(written(tmp_path / "tools.jsonl", *rows, {"name": "none"}))
    inner = {"type": "object", "properties": {"x": {"type": "number"}}}
    assert [tool.parameters for tool in found] == [
        {"type": "object", "required": ["a"],
         "properties": {"a": {"type": "array"}, "b": {"type": "string"}, "c": {}}},
        {"type": "object", "properties": {"a": inner}},
        {"type": "object", "properties": {}},
    ]  # fmt: skip


def test_queries_of_every_form(tmp_path: Path) -> None:
    rows = [
        {"query": "one", "tools": ["a", "b"]},
        {"question": "two", "tool": "a"},
        {"instruction": "three", "candidate_tools": ["a", "b"], "split": "train",
         "ground_truth": {"top_k": ["b"], "explanation": ""}},
        {"goal": "four", "target_tools": "[\"a\"]", "turns": []},
        {"id": "x", "query": "five", "calling": [{"api": "b", "parameters": {}}]},
        {"query": "one", "tools": "c"},
    ]  # fmt: skip
    path = written(tmp_path / "pairs.jsonl", *rows)
    found = {one.query: one.tools for one in read_asked(path, "abc")}
    assert found == {
        "one": ("a", "b", "c"), "two": ("a",), "three": ("b",), "four": ("a",), "five": ("b",),
    }  # fmt: skip
    assert [one.query for one in read_asked(path, "abc", split="train")] == ["three"]
    (tmp_path / "clean.csv").write_text('Query,Tool\n"Hello, you",a\n')
    assert read_asked(tmp_path / "clean.csv", "abc")[0].query == "Hello, you"
    with pytest.raises(BadInput, match="'c'") as told:
        read_asked(path, "ab")
    assert told.value.faults[0].where == f"{path}:6"
    with pytest.raises(BadInput, match=r"pairs.jsonl:1\n.*a query and its tools"):
        read_asked(written(path, {"query": "no tool"}), "ab")


def test_bm25_by_hand() -> None:
    ranking = BM25(["red apples", "red red car with the engine", "blue"])
    # Words: 2, 4 (`with` and `the` do not count), 1; their mean 7/3. `apples` and `apple` are one.
    idf_red, idf_apple = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    first, second = 1.5 * (0.25 + 0.75 * 2 / (7 / 3)), 1.5 * (0.25 + 0.75 * 4 / (7 / 3))
    red = [idf_red * 2.5 / (1 + first), idf_red * 2 * 2.5 / (2 + second), 0]
    assert ranking.scores("the RED") == pytest.approx(red)
    apple = idf_apple * 2.5 / (1 + first)
    assert ranking.scores("red apple") == pytest.approx([red[0] + apple, red[1], 0])
    assert not ranking.scores("nothing known").any()


def test_info_nce_by_hand() -> None:
    cosines = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    assert info_nce(cosines, torch.tensor([0, 1]), 1.0).item() == pytest.approx(0.404294, abs=1e-6)
    # Another right tool of a query is no negative of it: without one left the loss is 0.
    also = torch.tensor([[False, True], [False, False]])
    loss = info_nce(cosines, torch.tensor([0, 1]), 1.0, also).item()
    assert loss == pytest.approx(math.log(1 + math.exp(-0.6)) / 2, abs=1e-6)


def test_hard_negatives_are_likely_and_never_right() -> None:
    texts = ["green tea", "green car", "green car wash", "blue sky"]
    asked = [Asked("wash a green car", ("b",)), Asked("wash a green car", ("b", "c"))]
    one, two = hard_negatives(texts, asked, [[1], [1, 2]])
    assert one.tolist()[:2] == [2, 0]
    assert two.tolist()[:1] == [0]
    assert not {1} & {*one.tolist()}
    assert not {1, 2} & {*two.tolist()}


def test_ndcg_and_intervals_by_hand() -> None:
    # Right at ranks 2 and 3, of two right ones: (1/log2(3) + 1/2) / (1 + 1/log2(3)).
    assert ndcg([False, True, True], 2) == pytest.approx(0.693426, abs=1e-6)
    assert ndcg([True, *[False] * 9], 1) == 1.0
    assert ndcg([False] * 10, 3) == 0.0
    coin = np.array([[0.0, 1.0], [1.0, 1.0]] * 200)
    half, one = bootstrap(coin)
    assert (half.mean, one.mean, one.low, one.high) == (0.5, 1.0, 1.0, 1.0)
    # The standard error is 0.5 / sqrt(400): the interval reaches 1.96 of it.
    assert half.low == pytest.approx(0.451, abs=0.006)
    assert half.high == pytest.approx(0.549, abs=0.006)


def test_untrained_vectors_by_hand(tmp_path: Path) -> None:
    """a/(a + p) times the embeddings; wide ones keep their cosines in fewer dimensions."""
    model = write_word_model(tmp_path / "model", ["red", "car"], width=3)
    encoder = Encoder.of_model(model, ["red red RED car", ""])
    table = torch.eye(3)[:2] * torch.tensor([0.001 / 0.751, 0.001 / 0.251])[:, None]
    assert torch.allclose(encoder.table_VD[:2], table)
    expected = np.array([2 * 0.001 / 0.751, 0.001 / 0.251, 0])
    found = encoder.encode(["RedCar red", "unknown"])
    assert found[0] == pytest.approx(expected / np.linalg.norm(expected))
    wide = write_word_model(tmp_path / "wide", [f"w{n}" for n in range(40)], width=700)
    reduced = Encoder.of_model(wide, []).table_VD
    assert reduced.shape[1] == 576
    assert torch.allclose(reduced @ reduced.T, torch.eye(len(reduced)), atol=1e-4)


def test_summed_rows_of_texts_of_different_lengths() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = summed(table, [[0, 0, 1], [], [1]], torch.tensor([1.0, 10.0]))
    assert found.tolist() == [[2.0, 10.0], [0.0, 0.0], [0.0, 10.0]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[ToolIndex, Path]:
    """A retriever for tools whose queries share no word with them, and its model's folder."""
    tools, asked = tools_of_words(), asked_of()
    model = write_word_model(tmp_path_factory.mktemp("word") / "model")
    used, _, _ = held_out(asked, 0.25, seed=1)
    start = Encoder.of_model(model, [one.query for one in used])
    told: list[tuple[int, int, float]] = []
    plan = Schedule(epochs=15, rate=1e-2)
    index = fit(start, tools, used, model="words", schedule=plan,
                say=lambda step, steps, loss: told.append((step, steps, loss)))  # fmt: skip
    steps, losses = told[-1][1], [loss for _, _, loss in told]
    assert [step for step, _, _ in told] == list(range(1, steps + 1))
    assert sum(losses[-8:]) < sum(losses[:8]) / 2
    assert index.share < 0.5  # no query shares a word with its tool
    return index, model


def test_training_finds_what_shares_no_word(trained: tuple[ToolIndex, Path]) -> None:
    index, model = trained
    found = measure(index, asked_of(), untrained=model)
    seen = found.groups["tools seen"]
    ndcgs = {column: one.mean for column, one in seen.means["nDCG@10"].items()}
    assert ndcgs["trained"] > max(ndcgs["BM25"], ndcgs["untrained"]) + 0.3
    assert (seen.over_baseline["hit@1"]["trained"].low or 0) > 0
    # A quarter of the tools, and of the other queries, was never seen; no other query is asked.
    assert found.groups["tools unseen"].count + seen.count + found.left_out == len(asked_of())
    assert found.left_out == len(index.trained.queries)
    assert len(index.trained.tools) == 0.75 * KINDS


def test_a_saved_index_is_the_same_and_a_damaged_one_is_refused(
    trained: tuple[ToolIndex, Path], tmp_path: Path
) -> None:
    index, _ = trained
    index.save(tmp_path / "saved")
    again = ToolIndex.load(tmp_path / "saved")
    queries = [one.query for one in asked_of()]
    assert np.array_equal(index.scores(queries), again.scores(queries))
    assert (again.tools, again.trained, again.share) == (index.tools, index.trained, index.share)
    for name in ("state.json", "encoder.safetensors"):
        broken = shutil.copytree(tmp_path / "saved", tmp_path / name)
        content = (broken / name).read_bytes()
        (broken / name).write_bytes(content[:-3] + b"x" + content[-2:])
        with pytest.raises(BadInput, match=name):
            ToolIndex.load(broken)
    assert index.encoder is not None
    with pytest.raises(BadInput, match="512 rows, 513 tokens"):
        Encoder(index.encoder.tokenizer, index.encoder.table_VD[:-1])
    with pytest.raises(BadInput, match="missing"):
        ToolIndex.load(tmp_path)


def a_thousand() -> ToolIndex:
    """A thousand tools, of which one tells the weather."""
    letters = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    tools = [
        Tool(f"{verb}_{noun}", f"Does {verb} with any {noun}.", CITY)
        for verb in (
            "sort",
            "copy",
            "draw",
            "print",
            "send",
            "read",
            "lock",
            "fold",
            "weigh",
            "mix",
        )
        for noun in letters
    ]
    return ToolIndex([*tools[:700], Tool("get_weather", "The weather.", CITY), *tools[701:]])


def test_a_thousand_tools_and_a_short_context(tiny_model_dir: Path) -> None:
    index = a_thousand()
    find = RetrieveTools(ScriptedModel([]), tools=index)
    query = "What will the weather be?"
    found = asyncio.run(find(query, k=3))
    assert (len(found["tools"]), found["names"][0], found.attempts) == (3, "get_weather", 0)
    with tiny_sampler(tiny_model_dir, max_model_len=1000) as sampler:
        server = SamplerServer(sampler, load_tokenizer(tiny_model_dir), "tiny")
        try:
            client = openai.OpenAI(base_url=f"{server.start()}/v1", api_key="none", max_retries=0)
            asking: Any = {"model": "tiny", "messages": [{"role": "user", "content": query}]}
            every = [tool.to_openai() for tool in index.tools]
            with pytest.raises(openai.BadRequestError, match="1 to 999 tokens"):
                client.chat.completions.create(**asking, tools=every, max_tokens=5)
            reply = client.chat.completions.create(**asking, tools=found["tools"], max_tokens=5)
            client.close()
        finally:
            server.stop()
    assert reply.usage.prompt_tokens < 900
    assert reply.usage.completion_tokens > 0


def test_a_graph_asks_for_tools(tmp_path: Path) -> None:
    a_thousand().save(tmp_path / "index")

    class FindTools(RetrieveTools):
        """Finds the tools for a text."""

        index = tmp_path / "index"

    body = "found = await self.find(problem, k=2)\n"
    body += "reply = await self.custom(input=problem + ' '.join(found['names']))\n"
    body += "return reply['response']"
    code = simple(body, "self.find = operator.FindTools(self.llm)")
    graph = Graph("own", {"graph.py": code}, operators={"FindTools": FindTools, "Custom": Custom})
    model = ScriptedModel(["sunny"])
    run = asyncio.run(graph.run("Which weather? ", model=model))
    assert run.answer == "sunny", run
    assert "Which weather? get_weather" in str(model.asked[0].messages)


def test_the_operator_refuses_what_is_no_index_or_number() -> None:
    with pytest.raises(BadInput, match="a ToolIndex"):
        RetrieveTools(ScriptedModel([]))
    with pytest.raises(BadInput, match="from 1 to 128"):
        asyncio.run(RetrieveTools(ScriptedModel([]), tools=a_thousand())("weather", k=0))
    assert RetrieveTools.most_calls(retries=2) == 0
