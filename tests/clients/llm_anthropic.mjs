// Runs the official Anthropic TypeScript SDK through everything that a model server offers it.
//
//     llm_anthropic.mjs --url http://… --key KEY --model MODEL [--scenarios a,b]

import assert from 'node:assert/strict';

import { load, versionOf } from './installed.mjs';
import {
  DYING,
  IMAGE,
  PROMPT,
  QUESTION,
  RESULT,
  RESULTS,
  SYSTEM,
  WEATHER,
  args,
  dedup,
  options,
  refused,
  run,
  wrongKey,
} from './llm_scenarios.mjs';

const { Anthropic } = await load('@anthropic-ai/sdk');

const model = args.model;
const messages = [{ role: 'user', content: PROMPT }];
const question = [{ role: 'user', content: QUESTION }];
const tools = [{ name: 'weather', input_schema: WEATHER }];
const plain = { model, max_tokens: 100, system: SYSTEM, messages };
const api = new Anthropic(options());

const usageOf = (usage) => ({
  input: usage.input_tokens,
  output: usage.output_tokens,
  cached: usage.cache_read_input_tokens ?? 0,
  written: usage.cache_creation_input_tokens ?? 0,
});

const textOf = (message) => message.content.map((block) => (block.type === 'text' ? block.text : '')).join('');

function described(message) {
  assert.deepEqual([message.type, message.role], ['message', 'assistant']);
  assert.ok(message.id);
  return { text: textOf(message), stop: message.stop_reason, usage: usageOf(message.usage) };
}

/** The conversation after the call of the tool that `message` makes; its blocks go back as they came. */
function withResult(asked, message) {
  const { id } = message.content.find((block) => block.type === 'tool_use');
  return [
    ...asked,
    { role: 'assistant', content: message.content },
    { role: 'user', content: [{ type: 'tool_result', tool_use_id: id, content: RESULT }] },
  ];
}

async function roundTrip(ask) {
  const first = await ask(question);
  const call = first.content.find((block) => block.type === 'tool_use');
  const second = await ask(withResult(question, first));
  return {
    called: call.name,
    arguments: call.input,
    stop: first.stop_reason,
    text: textOf(second),
    usage: [usageOf(first.usage), usageOf(second.usage)],
  };
}

async function short(max_tokens, more) {
  const asked = [{ role: 'user', content: 'one two three four' }];
  return described(await api.messages.create({ model, max_tokens, messages: asked, ...more }));
}

const error = (e) => ({ error: e.constructor.name, status: e.status, type: e.type });

await run('anthropic-ts', versionOf('@anthropic-ai/sdk'), {
  message_plain: async () => described(await api.messages.create(plain)),

  async message_stream() {
    let [text, pieces] = ['', 0];
    const stream = api.messages.stream(plain).on('text', (piece) => {
      text += piece;
      pieces += 1;
    });
    const message = await stream.finalMessage();
    assert.equal(text, textOf(message));
    assert.ok(pieces > 1, 'the text did not come in pieces');
    return described(message);
  },

  async message_stream_raw() {
    const events = [];
    // The SDK keeps pings to itself.
    for await (const event of await api.messages.create({ ...plain, stream: true })) dedup(events, event.type);
    return { events };
  },

  message_tools: () => roundTrip((messages) => api.messages.create({ model, max_tokens: 100, messages, tools })),

  message_tools_stream: () =>
    roundTrip((messages) => api.messages.stream({ model, max_tokens: 100, messages, tools }).finalMessage()),

  async message_tools_parallel() {
    const asked = [{ role: 'user', content: `${QUESTION} #calls=2` }];
    const first = await api.messages.stream({ model, max_tokens: 100, messages: asked, tools }).finalMessage();
    const calls = first.content.filter((block) => block.type === 'tool_use');
    assert.equal(new Set(calls.map(({ id }) => id)).size, 2, 'two calls have two ids');
    // In the order of the calls, and both in one turn.
    const content = calls.map(({ id }, index) => ({ type: 'tool_result', tool_use_id: id, content: RESULTS[index] }));
    const messages = [...asked, { role: 'assistant', content: first.content }, { role: 'user', content }];
    const second = await api.messages.create({ model, max_tokens: 100, messages, tools });
    return {
      called: calls.map(({ name }) => name),
      stop: first.stop_reason,
      text: textOf(second),
      usage: usageOf(second.usage),
    };
  },

  message_length: () => short(2),

  message_stop: () => short(100, { stop_sequences: ['three'] }),

  async message_image() {
    const source = { type: 'base64', media_type: 'image/png', data: IMAGE };
    const content = [{ type: 'text', text: 'What is this' }, { type: 'image', source }];
    const asked = [{ role: 'user', content }];
    return described(await api.messages.create({ model, max_tokens: 100, messages: asked }));
  },

  async message_stream_dies() {
    let text = '';
    const e = await refused(Anthropic.APIError, async () => {
      const asked = [{ role: 'user', content: DYING }];
      const stream = api.messages.stream({ model, max_tokens: 100, messages: asked });
      await stream.on('text', (piece) => (text += piece)).finalMessage();
    });
    return { text, type: e.type };
  },

  async message_thinking() {
    const found = [];
    const ask = async (messages) => {
      const thinking = { type: 'adaptive' };
      const message = await api.messages
        .stream({ model, max_tokens: 2000, messages, tools, thinking })
        .finalMessage();
      found.push(...message.content.filter((block) => block.type === 'thinking'));
      return message;
    };
    const asked = [{ role: 'user', content: `${QUESTION} #reasoning=4` }];
    const first = await ask(asked);
    // The signature goes back with the thinking, and is checked.
    const second = await ask(withResult(asked, first));
    assert.equal(found.length, 1);
    assert.ok(found[0].signature);
    return { thinking: found[0].thinking, text: textOf(second), usage: usageOf(first.usage) };
  },

  // As the SDKs before October 2026 asked: an older version, another header for the key, sampling parameters.
  async message_of_old() {
    const headers = { 'x-api-key': args.key, authorization: null, 'anthropic-version': '2023-06-01' };
    const old = new Anthropic(options(args.key, headers));
    return described(await old.messages.create({ ...plain, temperature: 0.5 }));
  },

  async count_tokens() {
    const counted = await api.messages.countTokens({ model, system: SYSTEM, messages, tools });
    return { input: counted.input_tokens };
  },

  async models() {
    const models = [];
    for await (const one of api.models.list()) models.push(one.id);
    const one = await api.models.retrieve(model);
    assert.equal(one.type, 'model');
    assert.ok(one.created_at && one.display_name);
    return { models, retrieved: one.id };
  },

  unknown_model: async () =>
    error(
      await refused(Anthropic.NotFoundError, () => api.messages.create({ ...plain, model: 'no-such-model' })),
    ),

  async bad_key() {
    const stranger = new Anthropic(options(wrongKey()));
    return error(await refused(Anthropic.AuthenticationError, () => stranger.messages.create(plain)));
  },
});
