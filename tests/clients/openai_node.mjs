// The `openai` package of Node as an application uses it: node openai_node.mjs BASE_URL (KEY SCENARIO MODEL)...
// Prints one JSON object a line: what the application saw in each scenario.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.NODE_MODULES_OF}/`);
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);

const [base, ...asked] = process.argv.slice(2);
let client, model;
const exact = { temperature: 0, seed: 1, max_tokens: 8, messages: [{ role: "user", content: "Say hello." }] };

const scenarios = {
  async chat() {
    const answer = await client.chat.completions.create({ model, ...exact });
    return { text: answer.choices[0].message.content, id: answer._request_id, tokens: answer.usage.completion_tokens };
  },
  async stream() {
    let text = "", chunks = 0;
    for await (const chunk of await client.chat.completions.create({ model, stream: true, ...exact })) {
      chunks += 1;
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    return { text, chunks };
  },
  async tools() {
    const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
    const answer = await client.chat.completions.create({
      model, temperature: 0, seed: 1, max_tokens: 64, tool_choice: "required",
      messages: [{ role: "user", content: "What is the weather in Rome?" }],
      tools: [{ type: "function", function: { name: "get_weather", parameters } }],
    });
    return { calls: (answer.choices[0].message.tool_calls ?? []).map((call) => call.function.name) };
  },
  async completion() {
    const answer = await client.completions.create({ model, prompt: "The capital of France is", max_tokens: 4, temperature: 0, seed: 1 });
    return { text: answer.choices[0].text };
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model, input: ["one", "two"], encoding_format: "float" });
    return { vectors: answer.data.map((item) => item.embedding.length) };
  },
  async models() {
    const ids = [];
    for await (const item of client.models.list()) ids.push(item.id);
    return { ids, one: (await client.models.retrieve(model)).id };
  },
};

for (let at = 0; at < asked.length; at += 3) {
  client = new OpenAI({ baseURL: base, apiKey: asked[at] });
  model = asked[at + 2];
  let seen;
  try {
    seen = await scenarios[asked[at + 1]]();
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    seen = { error: error.constructor.name, status: error.status, code: error.code, id: error.requestID, message: error.message };
  }
  console.log(JSON.stringify(seen));
}
