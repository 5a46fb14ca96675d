// A smoke test with JavaScript: OpenAI's own client where it is installed, else nothing but fetch. Prints one JSON object.
const [url, model] = process.argv.slice(2);
const ask = { model, messages: [{ role: "user", content: "the cat sat" }], temperature: 0, max_tokens: 12 };

async function withClient(OpenAI) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const whole = await client.chat.completions.create(ask);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  const refused = await client.chat.completions.create({ ...ask, n: 0 }).catch((error) => error.status);
  return { by: "openai", whole: whole.choices[0].message.content, streamed, refused };
}

async function withFetch() {
  const post = (body) =>
    fetch(`${url}/v1/chat/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
  const whole = await (await post(ask)).json();
  const text = await (await post({ ...ask, stream: true })).text();
  const events = text.split("\n\n").filter((line) => line.startsWith("data: {"));
  const streamed = events.map((line) => JSON.parse(line.slice(6)).choices[0].delta.content ?? "").join("");
  return { by: "fetch", whole: whole.choices[0].message.content, streamed, refused: (await post({ ...ask, n: 0 })).status };
}

const client = await import("openai").then((module) => module.default, () => null);
console.log(JSON.stringify(client ? await withClient(client) : await withFetch()));
