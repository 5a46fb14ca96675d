// @ts-check
/** The server's routes. Addresses are relative, so that the page also works behind a proxy's prefix. */

/** @import { Asking, Chunk, Message, ModelCard } from "./types.js" */

/** Something the server said no to, in its own words. */
export class ApiError extends Error {
  /** @param {string} message @param {number} status  0 where it came in the middle of a stream. */
  constructor(message, status = 0) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

/** @returns {Promise<ModelCard>} */
export async function model() {
  const response = await send("v1/models", {});
  return (await response.json()).data[0];
}

/**
 * The chunks of an answer as they come; aborting `signal` hangs up, which is how the server learns of it.
 * @param {string} name
 * @param {Message[]} messages
 * @param {Asking} asking
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Chunk>}
 */
export async function* answer(name, messages, asking, signal) {
  const speculation = { ...asking.speculation, report: "trace" };
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...asking, model: name, messages, stream: true, speculation }),
    signal,
  });
  if (!response.body) throw new ApiError("The server sent an empty answer.");
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    /** @type {Chunk} */
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

/**
 * The data of server-sent events, one string each.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length > 0) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    // A consumer that stops iterating closes the connection.
    reader.cancel().catch(() => {});
  }
}

/** @param {string} address @param {RequestInit} options */
async function send(address, options) {
  /** @type {Response} */
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

/** @param {Response} response */
async function reason(response) {
  const fallback = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  try {
    return (await response.json()).error?.message ?? fallback;
  } catch {
    return fallback;
  }
}

/** Whether the request was aborted. @param {unknown} error */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/** What to show of an error. @param {unknown} error */
export function told(error) {
  if (error instanceof ApiError) return error.message;
  // A connection that breaks while it is read.
  return error instanceof TypeError ? "The connection to the server broke." : String(error);
}
