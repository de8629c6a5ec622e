// Asks a server by OpenAI's SDK for Node, and writes what it was told as one line of JSON.
//
// usage: node openai_sdk.mjs BASE_URL

import { createRequire } from "node:module";

const require = createRequire(import.meta.url); // which looks into NODE_PATH
const { OpenAI, NotFoundError, BadRequestError } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const own = { seed: 7, ignore_eos: true };
const ask = { model: "tiny", input: "The class statement", max_output_tokens: 8, ...own };
const endless = { ...ask, max_output_tokens: 100000 };

async function gather(stream, pick) {
  let told = "";
  for await (const event of stream) told += pick(event) ?? "";
  return told;
}

async function refused(promise, kind) {
  try {
    await promise;
    return false;
  } catch (error) {
    return error instanceof kind;
  }
}

const deltas = (event) => (event.type === "response.output_text.delta" ? event.delta : "");

const flows = {
  async models() {
    return (await client.models.list()).data.map((model) => model.id);
  },

  async completions() {
    const body = { model: "tiny", prompt: "The class", max_tokens: 8, ...own };
    const whole = (await client.completions.create(body)).choices[0].text;
    const stream = await client.completions.create({ ...body, stream: true });
    return [whole, await gather(stream, (chunk) => chunk.choices[0].text)];
  },

  async chat() {
    const messages = [{ role: "user", content: "The class statement" }];
    const body = { model: "tiny", messages, max_tokens: 8, ...own };
    const whole = (await client.chat.completions.create(body)).choices[0].message.content;
    const stream = await client.chat.completions.create({ ...body, stream: true });
    return [whole, await gather(stream, (chunk) => chunk.choices[0].delta.content)];
  },

  async responses() {
    const made = await client.responses.create(ask);
    const stream = await client.responses.create({ ...ask, stream: true });
    const replay = await client.responses.retrieve(made.id, { stream: true });
    const rest = await client.responses.retrieve(made.id, { stream: true, starting_after: 3 });
    return [
      made.output_text,
      (await client.responses.retrieve(made.id)).output_text,
      await gather(stream, deltas),
      await gather(replay, deltas),
      await gather(rest, deltas),
    ];
  },

  async background() {
    const made = await client.responses.create({ ...endless, background: true });
    const ended = await client.responses.cancel(made.id);
    const again = await client.responses.cancel(made.id);
    return [made.status, ended.status, again.status];
  },

  async foreground() {
    const made = await client.responses.create(ask);
    return await refused(client.responses.cancel(made.id), BadRequestError);
  },

  async items() {
    const made = await client.responses.create({ ...ask, input: [1, 2, 3].map(text) });
    const listed = [];
    for await (const item of client.responses.inputItems.list(made.id, { limit: 2 }))
      listed.push(item.content[0].text);
    return listed;
  },

  async deleted() {
    const made = await client.responses.create(ask);
    await client.responses.delete(made.id);
    return await refused(client.responses.retrieve(made.id), NotFoundError);
  },

  async left() {
    const stream = await client.responses.create({ ...endless, stream: true });
    for await (const event of stream) {
      if (event.type === "response.created") var id = event.response.id;
      if (event.type === "response.output_text.delta") break; // which leaves
    }
    return id;
  },
};

function text(number) {
  return { role: "user", content: `text ${number}` };
}

const told = {};
for (const [name, flow] of Object.entries(flows)) told[name] = await flow();
process.stdout.write(JSON.stringify(told) + "\n");
