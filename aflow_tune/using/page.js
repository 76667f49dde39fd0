"use strict";
// One problem in, one result out. Whatever a model wrote gets onto the page as text (textContent)
// or inside an image, never as markup.
const $ = (id) => document.getElementById(id);
const LEVELS = ["clean", "fallback 1", "fallback 2", "fallback 3"];
let request = null, clock = null;

function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function show(id, on) { $(id).hidden = !on; }

function usd(value, unknown) {
  if (value === null || value === undefined) return unknown;
  if (value === 0) return "$0";
  return "$" + (value < 0.01 ? value.toPrecision(2) : value.toFixed(4));
}

function counted(count, word) { return count + " " + word + (count === 1 ? "" : "s"); }

function number(value) { return value === null || value === undefined ? "–" : String(value); }

function picture(id, svg) {
  if (!svg) { $(id).removeAttribute("src"); return; }
  $(id).src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
}

function facts(rows) {
  const list = $("facts");
  list.replaceChildren();
  for (const [name, value] of rows) {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    list.append(pair);
  }
}

function fill(list, texts) {
  list.replaceChildren(...texts.map((text) => element("li", text)));
}

function refusal(one) {
  const where = one.line ? "line " + one.line + ", column " + one.column + ": " : "";
  return where + one.message;
}

function outcome(call) {
  if (call.kind === "model") return call.failure ? call.failure : "answered";
  if (call.kind !== "operator") {
    return call.outcome + (call.limits_hit.length ? " (" + call.limits_hit.join(", ") + ")" : "");
  }
  return call.outcome;
}

function called(call) {
  if (call.kind === "operator") return call.operator + "  " + call.instance;
  if (call.kind === "workflow") return "the workflow's code runs";
  if (call.kind === "program") return "program in the sandbox";
  const name = call.role === "policy" ? "the policy writes" : call.role + ": " + call.model;
  return call.retries ? name + " (" + counted(call.retries, "more attempt") + ")" : name;
}

function callRow(call) {
  const inner = (call.kind === "model" && call.role !== "policy") || call.kind === "program";
  const row = element("tr", undefined, inner ? "inner" : call.kind);
  row.append(element("td", call.start.toFixed(2) + " s", "num"));
  const what = element("td", called(call));
  if (call.reason) what.append(element("span", call.reason, "soft"));
  row.append(what);
  const bad = call.failure || !["answered", "repaired", "finished"].includes(outcome(call));
  row.append(element("td", outcome(call), bad ? "failed" : ""));
  row.append(element("td", call.seconds.toFixed(2), "n"));
  const model = call.kind === "model";
  row.append(element("td", model ? number(call.prompt_tokens) : "", "n"));
  row.append(element("td", model ? number(call.completion_tokens) : "", "n"));
  row.append(element("td", model ? usd(call.usd, "unknown") : "", "n"));
  return row;
}

function prompts(listed) {
  const names = Object.keys(listed);
  const made = names.map((name) => {
    const box = element("div", undefined, "prompt");
    box.append(element("b", name), element("pre", listed[name]));
    return box;
  });
  if (!made.length) made.push(element("p", "None: the operators' own prompts are used.", "soft"));
  $("prompts").replaceChildren(...made);
}

function parts(listed) {
  const cells = [];
  for (const [name, value] of Object.entries(listed)) {
    const bar = element("div", undefined, "bar");
    if (value !== null) {
      const inner = element("i");
      inner.style.width = Math.round(100 * Math.min(1, Math.max(0, value))) + "%";
      bar.append(inner);
    }
    const shown = value === null ? "not known" : value.toFixed(2);
    cells.push(element("span", name), bar, element("span", shown, "num"));
  }
  $("parts").replaceChildren(...cells);
}

function render(got) {
  const written = got.workflow;
  const clean = got.level === 0;
  $("verdict").className = "box " + (!got.answered ? "bad" : clean ? "good" : "fallback");
  $("verdict-label").textContent = got.answered
    ? "Answer, from " + got.level_meaning
    : "No answer: the last workflow ended with " + got.ending;
  $("answer").textContent = got.answered ? got.answer : "";
  show("answer", got.answered);
  $("verdict-reason").textContent = got.answered ? "" : got.reason;
  facts([
    ["level", LEVELS[got.level]],
    ["cost", usd(got.usd, "price not known")],
    ["seconds", got.seconds.toFixed(1)],
    ["model calls", String(got.model_calls)],
    ["tokens", number(got.tokens)],
    ["tokens of the policy", number(got.policy_tokens)],
  ]);

  show("reward", "reward" in got);
  if ("reward" in got) {
    $("reward-line").textContent = got.reward === null
      ? "Not scored: " + (got.score_reason || "the answer could not be compared")
      : "Reward " + got.reward.toFixed(2) + ", score " + number(got.score) +
        (got.score_reason ? " (" + got.score_reason + ")" : "");
    parts(got.parts);
  }

  const bound = written.bound;
  const most = bound
    ? "; at worst " + counted(bound.model_calls, "model call") + ", " +
      counted(bound.prompt_tokens + bound.completion_tokens, "token") +
      (bound.usd === null ? "" : ", " + usd(bound.usd))
    : "";
  const how = written.form ? "Read as " + written.form : "Could not be read";
  const turns = written.turns > 1 ? ", after " + counted(written.turns, "turn") : "";
  $("check-line").textContent = how + turns + "; " +
    (written.valid ? "passed the check" : "refused by the check") + most + ".";
  fill($("refusals"), written.refusals.map(refusal));
  picture("graph", written.svg);
  $("graph").parentElement.hidden = !written.svg;
  show("no-graph", !written.svg);
  prompts(written.prompts);
  $("code").textContent = written.code || "(none)";
  $("text").textContent = written.text;
  $("raw").open = !written.form;

  show("ran", !clean);
  $("ran-title").textContent = got.answered ? "Workflow that answered" : "Workflow that ran last";
  $("ran-level").textContent = got.level_meaning;
  fill($("attempts"), got.attempts.map((one) =>
    LEVELS[one.level] + ": " + one.ending + (one.reason ? " – " + one.reason : "")));
  picture("ran-graph", got.ran.svg);
  $("ran-graph").parentElement.hidden = !got.ran.svg;
  $("ran-code").textContent = got.ran.code;

  $("calls").replaceChildren(...got.calls.map(callRow));
  show("result", true);
}

function fail(text, faults) {
  $("failure-text").textContent = text;
  fill($("failure-faults"), (faults || []).map((one) =>
    one.where + ": expected " + one.expected + ", found " + one.found));
  show("failure", true);
}

function working(on) {
  $("solve").disabled = on;
  show("cancel", on);
  clearInterval(clock);
  $("status").textContent = "";
  if (!on) return;
  const began = Date.now();
  const tick = () => {
    $("status").textContent = "working, " + Math.round((Date.now() - began) / 1000) + " s";
  };
  tick();
  clock = setInterval(tick, 1000);
}

async function solve(event) {
  event.preventDefault();
  if (request) return;
  show("failure", false);
  show("result", false);
  const asked = { problem: $("problem").value, type: $("type").value };
  if (asked.type === "code" && $("entry").value.trim()) asked.entry_point = $("entry").value.trim();
  if ($("truth").value.trim()) asked.truth = $("truth").value;
  const headers = { "content-type": "application/json" };
  if ($("token").value) headers.authorization = "Bearer " + $("token").value;
  request = new AbortController();
  working(true);
  try {
    const answer = await fetch("/solve", {
      method: "POST", headers, body: JSON.stringify(asked), signal: request.signal,
    });
    const got = await answer.json();
    if (answer.status === 401) show("token-label", true);
    if (answer.ok) render(got);
    else fail(got.error || "the server answered " + answer.status, got.faults);
  } catch (error) {
    if (error.name === "AbortError") fail("Cancelled.");
    else fail("The server does not answer. Is it still running?");
  } finally {
    request = null;
    working(false);
  }
}

function typeChanged() {
  const code = $("type").value === "code";
  show("entry-label", code);
  $("truth-hint").textContent = code ? "(tests: asserts on the function)" : "";
}

async function start() {
  $("ask").addEventListener("submit", solve);
  $("cancel").addEventListener("click", () => request && request.abort());
  $("type").addEventListener("change", typeChanged);
  $("problem").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  typeChanged();
  const answer = await fetch("/about");
  if (answer.status === 401) { show("token-label", true); $("title").textContent = "of this server"; return; }
  const about = await answer.json();
  $("title").textContent = about.title;
}

start();
