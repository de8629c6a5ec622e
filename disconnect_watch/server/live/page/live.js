"use strict";
// Fills the page from the events of /live, and lets its reader start an answer and leave it.

const PLACES = ["free", "cached", "retained", "used"];
const RETRY_MS = 1000;
const at = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
let key = sessionStorage.getItem("key") || "";
let mine = "";
let lastCancel = 0;

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// The data of each server-sent event of a response, as it comes.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    unread += value;
    const whole = unread.split("\n\n");
    unread = whole.pop();
    for (const event of whole) {
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
    }
  }
}

function make(tag, text, classes) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (classes) element.className = classes;
  return element;
}

function total(models, name) {
  return models.reduce((sum, model) => sum + model[name], 0);
}

function showNumbers(models) {
  at("running").textContent = number.format(total(models, "num_running"));
  at("waiting").textContent = number.format(total(models, "num_waiting"));
  at("finished").textContent = number.format(total(models, "num_finished"));
  at("cancelled").textContent = number.format(total(models, "num_cancelled"));
  at("generated").textContent = number.format(total(models, "num_generated_tokens"));
  at("spared").textContent = number.format(total(models, "num_spared_tokens"));
  at("seconds").textContent = `${number.format(total(models, "seconds_spared").toPrecision(3))} s`;
}

function bar(request) {
  const longest = request.num_prompt_tokens + request.max_tokens;
  const prompt = Math.min(request.num_computed_tokens, request.num_prompt_tokens);
  const element = make("div", undefined, "bar");
  for (const [phase, tokens] of [["prefill", prompt], ["decode", request.num_generated_tokens]]) {
    if (!tokens) continue;
    const part = make("span", undefined, phase);
    part.style.width = `${(100 * tokens) / longest}%`;
    element.append(part);
  }
  return element;
}

function showRequests(models) {
  const items = [];
  for (const model of models) {
    for (const request of model.requests) {
      const item = make("li");
      const words = make("p");
      const phase = request.phase === "waiting" ? "queued" : request.phase;
      const isMine = mine && request.key.startsWith(mine);
      words.append(make("span", request.key.slice(0, 8) + (isMine ? " (yours)" : ""), isMine ? "mine" : ""));
      words.append(make("span", `${phase}, ${request.num_prompt_tokens} + ${request.num_generated_tokens} ` +
        `of at most ${request.max_tokens} tokens, ${request.num_blocks} blocks`));
      item.append(words, bar(request));
      items.push(item);
    }
  }
  at("requests").replaceChildren(...items);
  const more = total(models, "num_more");
  at("more").textContent = more ? `and ${number.format(more)} more` : items.length ? "" : "none";
}

function showBlocks(models) {
  const canvas = at("blocks");
  const runs = models.flatMap((model) => model.blocks);
  const counts = PLACES.map(() => 0);
  for (const [place, count] of runs) counts[place] += count;
  const blocks = counts.reduce((sum, count) => sum + count, 0);
  canvas.setAttribute("aria-label",
    PLACES.map((name, place) => `${counts[place]} ${name}`).reverse().join(", "));
  if (!blocks) return;
  const wide = canvas.clientWidth, high = canvas.clientHeight;
  const columns = Math.ceil(Math.sqrt((blocks * wide) / high));
  const rows = Math.ceil(blocks / columns);
  canvas.width = wide;
  canvas.height = high;
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colours = PLACES.map((name) => style.getPropertyValue(`--${name}`));
  const gap = wide / columns > 4 ? 1 : 0;
  let block = 0;
  for (const [place, count] of runs) {
    pen.fillStyle = colours[place];
    for (let end = block + count; block < end; block++) {
      const x = ((block % columns) * wide) / columns, y = (Math.floor(block / columns) * high) / rows;
      pen.fillRect(x, y, wide / columns - gap, high / rows - gap);
    }
  }
}

function showCancels(cancels) {
  const rows = cancels.map((cancel) => {
    const row = make("tr", undefined, cancel.number > lastCancel ? "new" : "");
    const isMine = mine && cancel.request_id.startsWith(mine);
    for (const text of [cancel.request_id.slice(0, 8) + (isMine ? " (yours)" : ""), cancel.reason,
      cancel.phase, number.format(cancel.num_tokens), `${cancel.milliseconds} ms`]) {
      row.append(make("td", text, isMine ? "mine" : ""));
    }
    if (isMine) {
      at("told").textContent =
        `You left; its blocks were free ${cancel.milliseconds} ms after the server's kernel heard of it.`;
    }
    return row;
  });
  if (cancels.length && cancels[0].number === lastCancel) return;
  lastCancel = cancels.length ? cancels[0].number : 0;
  at("cancels").replaceChildren(...rows);
}

function showModels(models) {
  const names = models.map((model) => model.name);
  if (at("model").childElementCount === names.length) return;
  at("model").replaceChildren(...names.map((name) => make("option", name)));
}

function show(frame) {
  showModels(frame.models);
  showNumbers(frame.models);
  showRequests(frame.models);
  showBlocks(frame.models);
  showCancels(frame.cancels);
}

async function watch() {
  for (;;) {
    try {
      const response = await fetch("live", { headers: headers() });
      at("key").hidden = response.status !== 401 && response.status !== 403;
      if (!response.ok) {
        at("link").textContent = at("key").hidden ? `the server says ${response.status}` : "a key is needed";
        if (!at("key").hidden) return;
      } else {
        at("link").textContent = "live";
        for await (const frame of events(response)) show(frame);
      }
    } catch {
      // The server is gone, or not there yet.
    }
    at("link").textContent = "no connection, trying again";
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function ask(leaving) {
  const url = `v2/models/${at("model").value}/generate_stream`;
  const body = JSON.stringify({
    text_input: at("prompt").value,
    parameters: { max_tokens: 4000, ignore_eos: true, temperature: 0.8 },
  });
  const response = await fetch(url, { method: "POST", body, headers: headers(), signal: leaving.signal });
  mine = response.headers.get("x-request-id") || "";
  if (!response.ok) throw new Error((await response.json()).error || response.status);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error);
    at("answer").append(event.text_output);
    at("answer").scrollTop = at("answer").scrollHeight;
  }
}

at("ask").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const leaving = new AbortController();
  at("answer").replaceChildren();
  at("told").textContent = "";
  at("start").disabled = true;
  at("leave").disabled = false;
  at("leave").onclick = () => leaving.abort();
  at("leave").focus();
  try {
    await ask(leaving);
    at("told").textContent = "It came to its end.";
  } catch (error) {
    if (error.name !== "AbortError") at("told").textContent = `It failed: ${error.message}`;
    else if (!at("told").textContent) at("told").textContent = "You left.";
  }
  at("leave").disabled = true;
  at("start").disabled = false;
  at("start").focus();
});

at("key").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  key = at("key-text").value;
  sessionStorage.setItem("key", key);
  watch();
});

watch();
