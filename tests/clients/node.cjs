// Leaves a server in one way, says so by a line, and stays until its input ends.
//
// usage: node node.cjs WAY URL

"use strict";

const http = require("node:http");
const [way, url] = process.argv.slice(2);

async function firstOf(body) {
  for await (const chunk of body) return chunk; // the return cancels the body
}

function streamed() {
  return new Promise((resolve, reject) => {
    const request = http.get(url, (response) => {
      response.once("data", () => resolve({ request, response }));
      response.on("error", () => {});
    });
    request.on("error", reject);
  });
}

function undici() {
  return require("undici"); // from NODE_PATH
}

async function rejects(promise) {
  await promise.then(
    () => { throw new Error("it was answered"); },
    () => {},
  );
}

const ways = {
  async fetchAbort() {
    const controller = new AbortController();
    const asked = fetch(url, { signal: controller.signal });
    process.stdout.write("asked\n");
    await line();
    controller.abort();
    await rejects(asked);
  },
  async fetchTimeout() {
    await rejects(fetch(url, { signal: AbortSignal.timeout(500) }));
  },
  async fetchBreak() {
    await firstOf((await fetch(url)).body);
  },
  async fetchCancel() {
    const reader = (await fetch(url)).body.getReader();
    await reader.read();
    await reader.cancel();
  },
  async fetchKeep() {
    const controller = new AbortController();
    const response = await fetch(url, { signal: controller.signal });
    const reader = response.body.getReader();
    await reader.read();
    process.stdout.write("kept\n");
    await line();
    controller.abort();
    await rejects(reader.read());
  },
  async httpDestroy() {
    const { request } = await streamed();
    request.destroy();
  },
  async undiciAbort() {
    const controller = new AbortController();
    const asked = undici().request(url, { signal: controller.signal });
    process.stdout.write("asked\n");
    await line();
    controller.abort();
    await rejects(asked);
  },
  async undiciTimeout() {
    await rejects(undici().request(url, { headersTimeout: 500 }));
  },
  async undiciDestroy() {
    const { body } = await undici().request(url);
    body.on("error", () => {});
    await new Promise((resolve) => body.once("data", resolve));
    body.destroy();
  },
  async stay() {
    await streamed();
  },
};

const waiting = [];
process.stdin.on("data", () => waiting.shift()?.());
process.stdin.on("end", () => process.exit(0));

function line() {
  return new Promise((resolve) => waiting.push(resolve));
}

ways[way]().then(() => process.stdout.write("left\n"));
