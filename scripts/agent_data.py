"""Writes workflows/data/agent: dialogues with tools, their catalogue and a benchmark, as SAGE's.

    python scripts/agent_data.py

Made from the templates below by a fixed seed. Cities, people and numbers of the benchmark occur in
no dialogue to learn from, nor does the wording of its requests.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "workflows" / "data" / "agent"
CITIES = {
    "train": [
        "Oslo",
        "Rome",
        "Lima",
        "Cairo",
        "Delhi",
        "Paris",
        "Quito",
        "Seoul",
        "Tunis",
        "Vienna",
    ],
    "test": ["Athens", "Bern", "Dakar", "Hanoi"],
}
PEOPLE = {
    "train": ["Ann", "Bob", "Carla", "Dev", "Emma", "Finn", "Gita", "Hugo", "Ines", "Jon"],
    "test": ["Kim", "Lea", "Max", "Nora"],
}
FOOD = {
    "train": ["bread", "rice", "soup", "cheese", "apples", "pasta", "beans", "tea"],
    "test": ["honey", "olives", "plums"],
}
NUMBERS = {"train": [2, 3, 4, 6, 8, 9, 12, 15], "test": [5, 7, 11]}

# tool_id: description, its arguments, requests to learn from, requests of the benchmark, result
TOOLS: dict[str, tuple[str, dict[str, str], list[str], list[str], str]] = {
    "weather_now_001": (
        "The weather of a city now", {"city": "string"},
        ["What is the weather in {city}?", "Is it raining in {city} today?",
         "How warm is it in {city}?", "Tell me how the sky looks over {city}."],
        ["Do I need an umbrella in {city}?", "Is the sun shining in {city}?"],
        "{city}: 12 degrees, cloudy",
    ),
    "time_zone_002": (
        "The local time of a city", {"city": "string"},
        ["What time is it in {city}?", "Tell me the local time in {city}.",
         "Is it already night in {city}?", "Which hour does the clock show in {city}?"],
        ["How late is it now in {city}?", "What does a clock in {city} say?"],
        "{city}: 14:30",
    ),
    "train_ticket_003": (
        "Book train tickets to a city", {"city": "string", "seats": "integer"},
        ["Book {number} train tickets to {city}.", "I need {number} seats on the train to {city}.",
         "Get us {number} places in the train to {city}, please."],
        ["Reserve {number} seats by rail to {city}.", "We are {number} and go to {city} by train."],
        "booked: {number} seats to {city}",
    ),
    "mail_send_004": (
        "Send a mail to a person", {"person": "string"},
        ["Write a mail to {person}.", "Send {person} a message by mail.",
         "Mail {person} that I am late.", "Drop {person} a line by mail."],
        ["Let {person} know by mail that we won.", "Please mail the news to {person}."],
        "sent to {person}",
    ),
    "calendar_add_005": (
        "Add a meeting with a person to the calendar", {"person": "string", "hour": "integer"},
        ["Put a meeting with {person} at {number} into my calendar.",
         "I meet {person} at {number}, note it in the calendar.",
         "Add {person} at {number} o'clock to my calendar."],
        ["Enter an appointment with {person} for {number} o'clock.",
         "My calendar should show {person} at {number}."],
        "added: {person}, {number}:00",
    ),
    "shop_order_006": (
        "Order food from the shop", {"item": "string", "count": "integer"},
        ["Order {number} packs of {item}.", "We are out of {item}, get {number}.",
         "Buy {number} of {item} from the shop.", "I want {number} packs of {item} delivered."],
        ["Have {number} units of {item} sent from the shop.", "Get {number} more {item}, please."],
        "ordered: {number} x {item}",
    ),
    "recipe_find_007": (
        "Find a recipe with an ingredient", {"item": "string"},
        ["Find a recipe with {item}.", "Search for something to cook with {item}.",
         "Retrieve a dish that uses {item}."],
        ["Find me a meal made of {item}.", "Search a dish for which I need {item}."],
        "a stew with {item}",
    ),
    "light_switch_008": (
        "Dim the lights of a room to a percentage", {"percent": "integer"},
        ["Dim the lights to {number} percent.", "Set the lights to {number} percent.",
         "Make the room darker, {number} percent light."],
        ["Turn the lamps down to {number} percent.", "I want only {number} percent light here."],
        "lights at {number} percent",
    ),
}  # fmt: skip
KEYS = {"seats": "number", "hour": "number", "count": "number", "percent": "number"}
TALK = {
    "train": [("Thanks, that was kind.", "You are welcome."), ("Good morning!", "Good morning!"),
              ("How are you?", "Fine, thank you."), ("You are a great help.", "Thank you!"),
              ("Wait, let me think first.", "Take your time."), ("Never mind.", "All right."),
              ("I like the rain.", "Rain has its charm."), ("Trains are wonderful.", "They are."),
              ("My calendar is a mess.", "That happens."), ("Bread is best.", "It is."),
              ("What can you do?", "I call tools."), ("Ha, funny!", "Glad you like it.")],
    "test": [("Thank you so much.", "You are welcome."), ("Good evening!", "Good evening!"),
             ("I love old clocks.", "They are lovely."), ("Mails can wait.", "All right."),
             ("That made me laugh.", "Glad you like it."), ("Just a moment, please.", "Sure.")],
}  # fmt: skip


def values(draw: random.Random, split: str) -> dict[str, Any]:
    return {
        "city": draw.choice(CITIES[split]),
        "person": draw.choice(PEOPLE[split]),
        "item": draw.choice(FOOD[split]),
        "number": draw.choice(NUMBERS[split]),
    }


def asked(draw: random.Random, tool: str, split: str) -> tuple[str, dict[str, Any], str]:
    """A request, the arguments that it names, and the tool's result."""
    _, arguments, learned, tested, result = TOOLS[tool]
    chosen = values(draw, split)
    text = draw.choice(learned if split == "train" else tested).format(**chosen)
    given = {name: chosen[KEYS.get(name, name)] for name in arguments}
    return text, given, result.format(**chosen)


def candidates(draw: random.Random, wanted: list[str], count: int = 3) -> list[str]:
    others = [tool for tool in TOOLS if tool not in wanted]
    names = wanted + draw.sample(others, max(0, count - len(wanted)))
    draw.shuffle(names)
    return names


def dialogue(draw: random.Random, number: int, kind: str) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    wanted: list[str] = []
    if kind == "timing" and draw.random() < 0.7:
        said, answer = draw.choice(TALK["train"])
        turns = [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        goal = "Talk, and call nothing if nothing is asked for"
    else:
        finds = kind == "retrieval"
        fitting = [tool for tool in TOOLS if ("_find_" in tool) == finds]
        wanted = draw.sample(fitting, 3 if kind == "planning" else 1)
        parts = [asked(draw, tool, "train") for tool in wanted]
        turns = [{"role": "user", "content": " Then: ".join(text for text, _, _ in parts)}]
        for tool, (_, arguments, result) in zip(wanted, parts, strict=True):
            turn = {"role": "tool", "tool_id": tool, "content": "", "arguments": arguments}
            turns.append({**turn, "result": result})
        turns.append({"role": "assistant", "content": "; ".join(it[2] for it in parts) + "."})
        goal = " and ".join(TOOLS[tool][0] for tool in wanted)
    return {
        "dialog_id": f"sft_{number:06d}",
        "goal": goal,
        "turns": turns,
        "target_tools": candidates(draw, wanted),
        "metadata": {"task_type": kind},
        "split": "train",
    }


def question(draw: random.Random, number: int, kind: str) -> dict[str, Any]:
    wanted: list[str] = []
    truth: dict[str, Any]
    if kind == "timing_judgment":
        called = number % 2 == 0
        if called:
            wanted = [draw.choice(list(TOOLS))]
            text = asked(draw, wanted[0], "test")[0]
        else:
            text, answer = TALK["test"][number // 2 % len(TALK["test"])]
        truth = {"should_call_tool": called, "reasoning_chain": "", "direct_answer": None}
        truth |= {} if called else {"direct_answer": answer}
    else:
        wanted = draw.sample(list(TOOLS), 1 if kind == "tool_selection" else 3)
        text = " Then: ".join(asked(draw, tool, "test")[0] for tool in wanted)
        truth = {"top_k": wanted, "explanation": ""}
        if kind == "task_planning":
            steps = [
                {"step_id": at, "description": TOOLS[tool][0], "tool_id": tool}
                for at, tool in enumerate(wanted)
            ]
            truth = {"plan_steps": steps, "tool_sequence": wanted, "success_criteria": ""}
    return {
        "sample_id": f"{kind}_{number:04d}",
        "task_type": kind,
        "instruction": text,
        "context": "",
        "candidate_tools": candidates(draw, wanted),
        "ground_truth": truth,
        "metadata": {},
        "split": "test",
    }


def main() -> None:
    draw = random.Random(17)
    shares = {"selection": 168, "planning": 144, "timing": 96, "retrieval": 72}
    kinds = list(itertools.chain.from_iterable([kind] * n for kind, n in shares.items()))
    draw.shuffle(kinds)
    wanted = {"tool_selection": 48, "task_planning": 24, "timing_judgment": 24}
    files: dict[str, list[dict[str, Any]]] = {
        "catalogue": [
            {
                "tool_id": tool,
                "name": tool.rsplit("_", 1)[0].replace("_", " "),
                "description": described,
                "inputs": [
                    {"name": name, "type": kind, "required": True}
                    for name, kind in arguments.items()
                ],
            }
            for tool, (described, arguments, *_) in TOOLS.items()
        ],
        "dialogues": [dialogue(draw, at, kind) for at, kind in enumerate(kinds)],
        "benchmark": [
            question(draw, at, kind) for kind, count in wanted.items() for at in range(count)
        ],
    }
    OUT.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (OUT / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
