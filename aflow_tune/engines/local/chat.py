"""Conversations as tokens, for the server, for learning from data, and for what shows them.

One `Renderer` makes the tokens of a prompt as the server sends them to the model, and of answers
as the model would draw them. For a chat template that does not know tools, they are text: the
tools listed in the system message, calls as `<tool_call>`, results as `<tool_result>`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput
from aflow_tune.scoring.turns import TAGGED_CALL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PREAMBLE = (
    "You may call one or more functions to help with the request.\n"
    "Their signatures are inside <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{{"name": <function name>, "arguments": <arguments object>}}\n</tool_call>'
)

Message = Mapping[str, Any]


@dataclass
class Rendered:
    """Tokens of a conversation, and which of them are learned. `prompt_length`: the tokens before
    the first learned one; `learned_R`: for each token after the prompt."""

    tokens_T: list[int]
    prompt_length: int
    learned_R: list[bool] = field(default_factory=list)


class Renderer:
    """Renders by the tokenizer's chat template. `ends`: tokens besides the tokenizer's own end
    token at which the model stops."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        template = str(tokenizer.chat_template or "")
        self._native = "tools" in template
        self._thinks = "reasoning_content" in template
        self._ends = {end for end in (tokenizer.eos_token_id, *ends) if end is not None}

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), **options: Any
    ) -> list[int]:
        """The tokens before the assistant's next message. `options` go to the chat template.
        Raises BadInput: a message cannot be rendered, or the template refuses the messages."""
        return self._ids(self._text(messages, tools, {"add_generation_prompt": True, **options}))

    def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        answer: Message,
        **options: Any,
    ) -> list[int]:
        """The tokens that the model draws after `prompt(messages, tools)` if it answers `answer`,
        the end token included. Raises BadInput as `prompt`, or if the template writes another
        beginning for an answer than it gives the model."""
        before = self._text(messages, tools, {"add_generation_prompt": True, **options})
        whole = self._text([*messages, answer], tools, {**options, "add_generation_prompt": False})
        if not whole.startswith(before):
            title, where = "The chat template cannot be learned from", f"messages[{len(messages)}]"
            expected = f"an answer that begins as its prompt ends ({before[-40:]!r})"
            fix = "set enable_thinking, or another chat_template, for serving and for learning"
            raise BadInput.of(title, where, expected, repr(whole[-80:]), fix)
        ids = self._ids(whole[len(before) :])
        last = max((at for at, token in enumerate(ids) if token in self._ends), default=None)
        if last is None:  # a template without an end: the model has to stop nevertheless
            return [*ids, self.tokenizer.eos_token_id]
        return ids[: last + 1]

    def examples(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        last_only: bool = False,
        **options: Any,
    ) -> list[Rendered]:
        """A conversation to learn: every token of the assistant's messages, or of the last one;
        not of one with `weight: 0`, as OpenAI marks it.

        One sequence as long as the prompt of each answer begins with what was rendered before; if
        a template rewrites what is past (it drops earlier thoughts), another sequence begins
        there, so that each answer is learned after the very tokens that it is drawn after.
        """
        answered = [
            at
            for at, it in enumerate(messages)
            if it.get("role") == "assistant" and it.get("weight") != 0
        ]
        found: list[Rendered] = []
        for at in answered[-1:] if last_only else answered:
            prompt = self.prompt(messages[:at], tools, **options)
            answer = self.answer(messages[:at], tools, messages[at], **options)
            known = found[-1].tokens_T if found else []
            if not known or prompt[: len(known)] != known:
                found.append(Rendered(prompt, len(prompt)))
            else:
                new = prompt[len(known) :]
                found[-1].tokens_T += new
                found[-1].learned_R += [False] * len(new)
            found[-1].tokens_T = found[-1].tokens_T + answer
            found[-1].learned_R += [True] * len(answer)
        return found

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Message], options: dict[str, Any]
    ) -> str:
        told = template_messages(messages, tools, native=self._native, thinks=self._thinks)
        try:
            text: Any = self.tokenizer.apply_chat_template(
                told,
                tools=list(tools) if tools and self._native else None,
                tokenize=False,
                **options,
            )
        except Exception as error:
            # Templates are programs and raise errors of many classes.
            raise BadInput(f"the chat template refused the messages: {error}") from error
        return str(text)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def template_messages(
    messages: Sequence[Message],
    tools: Sequence[Message],
    *,
    native: bool,
    thinks: bool = True,
) -> list[dict[str, Any]]:
    """OpenAI messages in the form for a chat template. `native`: the template renders tools itself;
    else they become text. `thinks`: it renders `reasoning_content`; else that goes before the
    content. Raises BadInput: content that is not text, arguments not JSON."""
    plain = [_plain(message, number) for number, message in enumerate(messages)]
    for message in plain:
        if not thinks and (thought := message.pop("reasoning_content", None)):
            message["content"] = f"<think>\n{thought}\n</think>\n{message['content']}"
    if native:
        return plain
    told: list[dict[str, Any]] = []
    for message in plain:  # tools as text, for a template that supports only roles and text
        role, content = message["role"], message["content"]
        for call in message.get("tool_calls", []):
            written = json.dumps(call["function"], ensure_ascii=False)
            content += f"\n<tool_call>\n{written}\n</tool_call>"
        if role == "tool":
            role, content = "user", f"<tool_result>\n{content}\n</tool_result>"
        kept = {"reasoning_content": it} if (it := message.get("reasoning_content")) else {}
        told.append({"role": role, "content": content.lstrip("\n"), **kept})
    if tools:
        listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        preamble = _PREAMBLE.format(tools=listing)
        if told and told[0]["role"] == "system":
            told[0]["content"] += f"\n\n{preamble}"
        else:
            told.insert(0, {"role": "system", "content": preamble})
    return told


def _plain(message: Message, number: int) -> dict[str, Any]:
    """The message with its content as text and the arguments of its tool calls parsed."""

    def refused(key: str, expected: str, found: str) -> BadInput:
        title, where = "A message cannot be rendered", f"messages[{number}].{key}"
        return BadInput.of(title, where, expected, found, f"send {expected}")

    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise refused("content", "a text, or a list of parts of type text", repr(content)[:80])
        odd = [p.get("type") for p in content if p.get("type") not in ("text", "refusal")]
        if odd:
            raise refused("content", "text only: no images, no audio", f"a part of type {odd[0]}")
        content = "".join(part.get("text") or part.get("refusal") or "" for part in content)
    result = {**message, "content": content or ""}
    calls = []
    for call in result.pop("tool_calls", None) or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused("tool_calls", "calls with `function: {name, arguments}`", repr(call)[:80])
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except json.JSONDecodeError as error:
            raise refused("tool_calls", "arguments as a JSON object", str(error)) from error
        calls.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return result | ({"tool_calls": calls} if calls else {})


def parse_calls(
    text: str, names: Sequence[str], *, salt: str
) -> tuple[str | None, list[dict[str, Any]]]:
    """The text outside the tool calls (None if empty), and the calls in OpenAI's format. If any is
    not valid JSON for a function in `names`, all is text. Equal `salt` and text: equal ids."""
    calls: list[dict[str, Any]] = []
    for position, match in enumerate(TAGGED_CALL.finditer(text)):
        try:
            call = json.loads(match[1])
            arguments = call.get("arguments", {}) if isinstance(call, dict) else None
            written = json.dumps(arguments, ensure_ascii=False)
            written.encode()  # half an emoji is no text
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(arguments, dict) or call.get("name") not in names:
            return text, []
        digest = hashlib.sha256(f"{salt}/{position}/{match[1]}".encode()).hexdigest()
        function = {"name": call["name"], "arguments": written}
        calls.append({"id": f"call_{digest[:24]}", "type": "function", "function": function})
    return (TAGGED_CALL.sub("", text).strip() or None, calls) if calls else (text, [])
