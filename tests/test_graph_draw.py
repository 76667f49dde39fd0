"""Pictures of graphs, and `aflow-tune graph`: what they show, and that text stays text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from graph_samples import GATHER, MATH, MATH_PROMPTS, own_form, simple, write_round

from aflow_tune.cli import main
from aflow_tune.errors import ExitCode
from aflow_tune.graph.draw import to_mermaid, to_svg
from aflow_tune.graph.graph import Graph, load_graph, read_graph
from aflow_tune.report.records import EvalRecord, append_record

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def math(tmp_path: Path) -> Graph:
    return load_graph(write_round(tmp_path, "MATH", 2, MATH, MATH_PROMPTS))


def boxes(svg: str) -> list[tuple[float, ...]]:
    """x, y, width, height of every box."""
    rects = ElementTree.fromstring(svg).iterfind(f".//{SVG}g/{SVG}rect")
    return [tuple(float(r.attrib[name]) for name in ("x", "y", "width", "height")) for r in rects]


def test_mermaid_of_a_graph(math: Graph) -> None:
    assert (
        to_mermaid(math.flow)
        == """\
flowchart TD
    problem(["problem"])
    n0["custom: Custom<br/>DRAFT#95;PROMPT"]
    n1["custom: Custom<br/>AGAIN#95;PROMPT"]
    n2["sc#95;ensemble: ScEnsemble"]
    answer(["answer"])
    problem --> n0
    problem --> n1
    problem --> n2
    n0 --> n1
    n0 --> n2
    n1 --> n2
    n2 --> answer
""".replace("#95;", "_")
    )


def test_svg_has_a_box_for_each_call_and_none_lies_on_another(tmp_path: Path) -> None:
    flow = load_graph(write_round(tmp_path, "D", 1, GATHER, "")).flow
    svg = to_svg(flow)
    drawn = boxes(svg)
    assert len(drawn) == len(flow.nodes) + 2
    root = ElementTree.fromstring(svg)
    assert len([p for p in root.iter(f"{SVG}path") if p.get("class")]) == len(flow.edges)
    for number, (x, y, width, height) in enumerate(drawn):
        assert x >= 0
        assert x + width <= float(root.attrib["width"])
        for x2, y2, width2, height2 in drawn[number + 1 :]:
            assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


HOSTILE = '"]; end click n0 "javascript:alert(1)" <script>alert(1)</script> %%{init: {}}%% \u202e&'


def test_names_from_a_graph_stay_text(tmp_path: Path) -> None:
    call = f"for x in [{HOSTILE!r}]:\n    await self.custom(x, getattr(prompt_custom, {HOSTILE!r}))"
    graph = read_graph(own_form(tmp_path / "g", simple(call)))
    svg = to_svg(graph.flow, title=HOSTILE)
    tags = {node.tag.removeprefix(SVG) for node in ElementTree.fromstring(svg).iter()}
    assert tags == {"svg", "title", "style", "defs", "marker", "path", "rect", "g", "text"}
    assert "\u202e" not in svg
    mermaid = to_mermaid(graph.flow)
    labels = re.findall(r'\["(.*?)"\]', mermaid)
    assert any("script" in label for label in labels)
    for label in labels:
        assert not re.search(r'[<>"%;`{}\]\[]', re.sub(r"#\d+;|<br/>", "", label))
    assert "javascript" not in re.sub(r'\["(.*?)"\]', "", mermaid)


def test_show(math: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "show", math.label]) == ExitCode.DONE
    shown = capsys.readouterr().out
    for words in (
        "(MATH, round 2)",
        "sc_ensemble: ScEnsemble, line 21",
        "DRAFT_PROMPT: Solve the problem. Put the answer into a box.",
        "custom (line 27) feeds sc_ensemble (line 32)",
    ):
        assert words in shown
    mark = tmp_path / "ran"
    head = f"open({str(mark)!r}, 'w').close()"
    folder = own_form(tmp_path / "g", simple("return prompt_custom.NOPE", head=head))
    assert main(["graph", "show", str(folder)]) == ExitCode.BAD_INPUT
    assert "found:    prompt_custom.NOPE" in capsys.readouterr().out
    assert not mark.exists()


def test_draw_with_the_numbers_of_a_run(
    math: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(item: int, reward: float | None) -> EvalRecord:
        chosen = [{"caller": "ScEnsemble.sc_ensemble", "prompt_tokens": 30, "tokens": 5}]
        lost = {"caller": "Custom.custom", "prompt_tokens": None, "tokens": None, "failed": True}
        drafts = [{"caller": "Custom.custom", "prompt_tokens": 10, "tokens": 20}] * 3
        outcome = "answered" if reward is not None else "model_failed"
        use = {"operator": "Custom", "instance": "custom", "outcome": outcome, "attempts": 1}
        calls = [*drafts, *chosen] if reward is not None else [lost]
        place = {"step": 4, "taskset": "held_out", "item": item, "run": 0}
        return EvalRecord(**place, score=reward, reward=reward, calls=calls, operators=[use])

    for item, reward in enumerate([1.0, 0.0, None]):
        append_record(tmp_path / "run" / "evaluations", record(item, reward))
    command = ["graph", "draw", math.label, "--run", str(tmp_path / "run")]
    assert main(command) == ExitCode.DONE
    drawn = capsys.readouterr().out
    custom = next(line for line in drawn.splitlines() if "custom: Custom" in line)
    ensemble = next(line for line in drawn.splitlines() if "sc_ensemble: ScEnsemble" in line)
    assert "180 tokens" in custom  # two runs of three drafts, thirty tokens each
    assert "75#37; of the reward" in custom
    assert "1 failures" in custom
    assert "70 tokens" in ensemble
    assert "25#37; of the reward" in ensemble

    assert main([*command[:-1], str(tmp_path / "nowhere")]) == ExitCode.BAD_INPUT
    assert "nowhere" in capsys.readouterr().err
