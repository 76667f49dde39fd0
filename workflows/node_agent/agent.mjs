// Answers the question in its argument: a loop of calls and tool results, as OpenAI's package has it.
import OpenAI from "openai";

const client = new OpenAI(); // OPENAI_BASE_URL, OPENAI_API_KEY
const parameters = {
  type: "object",
  properties: { a: { type: "number" }, b: { type: "number" } },
  required: ["a", "b"],
};
const tools = [{ type: "function", function: { name: "add", description: "The sum of two numbers.", parameters } }];
const messages = [
  { role: "developer", content: "Answer with a number. Use the tool to add." },
  { role: "user", content: process.argv[2] },
];

for (let turn = 0; turn < 5; turn++) {
  const { choices } = await client.chat.completions.create({ model: "policy", messages, tools });
  const message = choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) break;
  for (const call of message.tool_calls) {
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
  }
}
console.log(messages.at(-1).content);
