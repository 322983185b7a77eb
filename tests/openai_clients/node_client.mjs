// Asks a server with the client of OpenAI for Node: `node node_client.mjs URL`; prints JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Hel|lo" }];
const model = "letters";

const whole = await client.chat.completions.create({ model, messages });
const streamed = [];
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
  if (chunk.choices[0]?.delta?.content) streamed.push(chunk.choices[0].delta.content);
}
const final = await client.chat.completions.stream({ model, messages }).finalContent();
const completion = await client.completions.create({ model, prompt: "a|b" });
const embeddings = await client.embeddings.create({ model: "embed", input: ["a", "bb"] });
const response = await client.responses.create({ model, input: "Hel|lo" });
const call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>';
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const called = await client.chat.completions
  .stream({
    model: "talker",
    messages: [{ role: "user", content: call }],
    tools: [{ type: "function", function: { name: "weather", parameters: city } }],
  })
  .finalChatCompletion();
const parsed = await client.chat.completions.parse({
  model: "talker",
  messages: [{ role: "user", content: '{"city": |"Oslo"}' }],
  response_format: { type: "json_schema", json_schema: { name: "place", schema: city } },
});
let missing = "";
try {
  await client.chat.completions.create({ model: "ghost", messages });
} catch (error) {
  missing = `${error.constructor.name} ${error.status} ${error.code}`;
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    usage: whole.usage.total_tokens,
    streamed,
    final,
    completion: completion.choices[0].text,
    vectors: embeddings.data.map((each) => each.embedding),
    response: response.output_text,
    call: called.choices[0].message.tool_calls.map((each) => each.function.arguments),
    structured: JSON.parse(parsed.choices[0].message.content),
    missing,
  }),
);
