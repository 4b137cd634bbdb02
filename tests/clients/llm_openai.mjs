// Runs the official OpenAI TypeScript SDK through everything that a model server offers it.
//
//     llm_openai.mjs --url http://…/v1 --key KEY --model MODEL [--embedding-model MODEL] [--scenarios a,b]

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

const { OpenAI } = await load('openai');
const { zodResponseFormat } = await load('openai/helpers/zod');
const { z } = await load('zod');

const model = args.model;
const messages = [{ role: 'system', content: SYSTEM }, { role: 'user', content: PROMPT }];
const question = [{ role: 'user', content: QUESTION }];
const chatTools = [{ type: 'function', function: { name: 'weather', parameters: WEATHER } }];
const tools = [{ type: 'function', name: 'weather', parameters: WEATHER, strict: true }];
const Forecast = z.object({ city: z.string(), days: z.number().int(), sunny: z.boolean() });
const api = new OpenAI(options());

function chatUsage(usage) {
  if (!usage) return null;
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  return {
    input: usage.prompt_tokens,
    output: usage.completion_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

function usageOf(usage) {
  assert.equal(usage.total_tokens, usage.input_tokens + usage.output_tokens);
  return {
    input: usage.input_tokens,
    output: usage.output_tokens,
    cached: usage.input_tokens_details.cached_tokens,
    reasoning: usage.output_tokens_details.reasoning_tokens,
  };
}

async function streamed(more) {
  let [text, finish, pieces] = ['', null, 0];
  const [usage, ids] = [[], new Set()];
  for await (const chunk of await api.chat.completions.create({ model, messages, stream: true, ...more })) {
    ids.add(chunk.id);
    if (chunk.usage) {
      assert.deepEqual(chunk.choices, [], 'usage came in a chunk with choices');
      usage.push(chatUsage(chunk.usage));
    }
    for (const choice of chunk.choices) {
      text += choice.delta.content ?? '';
      pieces += choice.delta.content ? 1 : 0;
      finish = choice.finish_reason ?? finish;
    }
  }
  assert.equal(ids.size, 1, 'one answer has one id');
  assert.ok(pieces > 1, 'the text did not come in pieces');
  return { text, finish, usage };
}

/** A question, a call, its result, an answer. `ask` completes a conversation. */
async function roundTrip(ask) {
  const first = await ask(question);
  const { message, finish_reason: finish } = first.choices[0];
  const [{ id, function: call }] = message.tool_calls;
  const made = {
    role: 'assistant',
    tool_calls: [{ id, type: 'function', function: { name: call.name, arguments: call.arguments } }],
  };
  const second = await ask([...question, made, { role: 'tool', tool_call_id: id, content: RESULT }]);
  return {
    called: call.name,
    arguments: JSON.parse(call.arguments),
    finish,
    text: second.choices[0].message.content,
    usage: [chatUsage(first.usage), chatUsage(second.usage)],
  };
}

async function short(more) {
  const asked = [{ role: 'user', content: 'one two three four' }];
  const answer = await api.chat.completions.create({ model, messages: asked, ...more });
  const [choice] = answer.choices;
  return { text: choice.message.content, finish: choice.finish_reason, usage: chatUsage(answer.usage) };
}

const error = (e) => ({ error: e.constructor.name, status: e.status, code: e.code, type: e.type });

await run('openai-ts', versionOf('openai'), {
  async chat_plain() {
    const answer = await api.chat.completions.create({ model, messages });
    assert.equal(answer.object, 'chat.completion');
    assert.ok(answer.id && answer.model);
    const [choice] = answer.choices;
    assert.equal(choice.message.role, 'assistant');
    return { text: choice.message.content, finish: choice.finish_reason, usage: chatUsage(answer.usage) };
  },

  chat_stream: () => streamed({}),

  chat_stream_usage: () => streamed({ stream_options: { include_usage: true } }),

  chat_tools: () => roundTrip((messages) => api.chat.completions.create({ model, messages, tools: chatTools })),

  chat_tools_stream: () =>
    roundTrip((messages) =>
      api.chat.completions
        .stream({ model, messages, tools: chatTools, stream_options: { include_usage: true } })
        .finalChatCompletion(),
    ),

  async chat_tools_parallel() {
    const asked = [{ role: 'user', content: `${QUESTION} #calls=2` }];
    const stream = api.chat.completions.stream({ model, messages: asked, tools: chatTools });
    const [{ message, finish_reason: finish }] = (await stream.finalChatCompletion()).choices;
    const calls = message.tool_calls;
    assert.equal(new Set(calls.map(({ id }) => id)).size, 2, 'two calls have two ids');
    const made = calls.map(({ id, function: { name, arguments: given } }) => ({
      id,
      type: 'function',
      function: { name, arguments: given },
    }));
    // In the order of the calls, and both before anything else.
    const results = calls.map(({ id }, index) => ({ role: 'tool', tool_call_id: id, content: RESULTS[index] }));
    const messages = [...asked, { role: 'assistant', content: null, tool_calls: made }, ...results];
    const second = await api.chat.completions.create({ model, messages, tools: chatTools });
    return {
      called: calls.map((call) => call.function.name),
      finish,
      text: second.choices[0].message.content,
      usage: chatUsage(second.usage),
    };
  },

  chat_length: () => short({ max_completion_tokens: 2 }),

  chat_stop: () => short({ stop: ['three'] }),

  async chat_image() {
    const image = { type: 'image_url', image_url: { url: `data:image/png;base64,${IMAGE}` } };
    const content = [{ type: 'text', text: 'What is this' }, image];
    const answer = await api.chat.completions.create({ model, messages: [{ role: 'user', content }] });
    return { text: answer.choices[0].message.content, usage: chatUsage(answer.usage) };
  },

  async chat_stream_dies() {
    let text = '';
    const e = await refused(OpenAI.APIError, async () => {
      const asked = [{ role: 'user', content: DYING }];
      for await (const chunk of await api.chat.completions.create({ model, messages: asked, stream: true })) {
        for (const choice of chunk.choices) {
          text += choice.delta.content ?? '';
          assert.equal(choice.finish_reason, null, 'what died did not finish');
        }
      }
    });
    assert.ok(e.message);
    return { text, type: e.type };
  },

  async chat_parsed() {
    const format = zodResponseFormat(Forecast, 'Forecast');
    const answer = await api.chat.completions.parse({ model, messages: question, response_format: format });
    return { parsed: Forecast.parse(answer.choices[0].message.parsed), usage: chatUsage(answer.usage) };
  },

  async embeddings() {
    const request = { model: args['embedding-model'], input: ['hello world', 'and good bye'], dimensions: 8 };
    // By default the SDK asks for base64 and decodes it.
    const packed = await api.embeddings.create(request);
    const plain = await api.embeddings.create({ ...request, encoding_format: 'float' });
    const vectors = packed.data.map((one) => one.embedding);
    assert.deepEqual(vectors, plain.data.map((one) => one.embedding), 'the two encodings differ');
    assert.deepEqual(packed.data.map((one) => one.index), [0, 1]);
    assert.notDeepEqual(vectors[0], vectors[1]);
    assert.equal(packed.usage.total_tokens, packed.usage.prompt_tokens);
    return { dimensions: vectors.map((one) => one.length), usage: packed.usage.prompt_tokens };
  },

  async models() {
    const models = [];
    for await (const one of api.models.list()) models.push(one.id);
    const one = await api.models.retrieve(model);
    assert.equal(one.object, 'model');
    return { models, retrieved: one.id };
  },

  async responses_plain() {
    const answer = await api.responses.create({ model, instructions: SYSTEM, input: PROMPT, store: false });
    assert.equal(answer.object, 'response');
    assert.equal(answer.error, null);
    return { text: answer.output_text, status: answer.status, usage: usageOf(answer.usage) };
  },

  async responses_stream() {
    const [numbers, events] = [[], []];
    const stream = api.responses.stream({ model, instructions: SYSTEM, input: PROMPT });
    for await (const event of stream) {
      numbers.push(event.sequence_number);
      dedup(events, event.type);
    }
    assert.deepEqual(numbers, [...numbers.keys()], 'the numbers have gaps');
    const answer = await stream.finalResponse();
    return { text: answer.output_text, status: answer.status, usage: usageOf(answer.usage), events };
  },

  async responses_tools() {
    const first = await api.responses.create({ model, input: QUESTION, tools });
    const call = first.output.find((item) => item.type === 'function_call');
    const input = [{ type: 'function_call_output', call_id: call.call_id, output: RESULT }];
    const second = await api.responses
      .stream({ model, input, tools, previous_response_id: first.id })
      .finalResponse();
    return {
      called: call.name,
      arguments: JSON.parse(call.arguments),
      text: second.output_text,
      usage: [usageOf(first.usage), usageOf(second.usage)],
    };
  },

  async responses_stored() {
    const first = await api.responses.create({ model, input: 'My name is Ada' });
    const onwards = { model, input: 'go on', previous_response_id: first.id };
    const second = await api.responses.create(onwards);
    assert.equal(second.previous_response_id, first.id);
    const again = await api.responses.retrieve(first.id);
    assert.equal(again.output_text, first.output_text);
    const items = [];
    for await (const item of api.responses.inputItems.list(first.id)) items.push(item.content[0].text);
    await api.responses.delete(first.id);
    const gone = await refused(OpenAI.NotFoundError, () => api.responses.retrieve(first.id));
    const lost = await refused(OpenAI.APIError, () => api.responses.create(onwards));
    await api.responses.delete(second.id);
    return {
      text: second.output_text,
      usage: [usageOf(first.usage), usageOf(second.usage)],
      items,
      gone: gone.status,
      lost: [lost.status, lost.code],
    };
  },

  async responses_stream_dies() {
    let text = '';
    // This SDK throws; the other one hands it on.
    const e = await refused(OpenAI.APIError, async () => {
      for await (const event of await api.responses.create({ model, input: DYING, stream: true })) {
        if (event.type === 'response.output_text.delta') text += event.delta;
      }
    });
    assert.ok(e.message);
    return { text, code: e.code };
  },

  unknown_model: async () =>
    error(
      await refused(OpenAI.NotFoundError, () => api.chat.completions.create({ model: 'no-such-model', messages })),
    ),

  async bad_key() {
    const stranger = new OpenAI(options(wrongKey()));
    return error(
      await refused(OpenAI.AuthenticationError, () => stranger.chat.completions.create({ model, messages })),
    );
  },
});
