// What the model clients in TypeScript share: arguments, scenarios by name, one JSON line for each.
//
// The Python clients run the same scenarios under the same names and print the same fields (llm_scenarios.py), so that a
// test can hold the four against each other. A scenario that throws ends the program with exit code 1.

import assert from 'node:assert/strict';
import { parseArgs } from 'node:util';

export const LIMIT_S = 60;
export const SYSTEM = 'Answer in one sentence.';
export const PROMPT = 'Say hello to the world #cached=8 #reasoning=3';
export const QUESTION = 'Weather in Rome';
export const RESULT = 'sunny, 24 degrees';
export const RESULTS = ['sunny', 'rainy'];
export const DYING = 'One two three four #dies_after=3';
// A pixel.
export const IMAGE = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==';
export const WEATHER = {
  type: 'object',
  properties: { city: { type: 'string' }, days: { type: 'integer' } },
  required: ['city', 'days'],
  additionalProperties: false,
};

// `url` is as the SDK takes it: with /v1 for OpenAI's, without for Anthropic's.
export const { values: args } = parseArgs({
  options: {
    url: { type: 'string' },
    key: { type: 'string' },
    model: { type: 'string' },
    'embedding-model': { type: 'string' },
    scenarios: { type: 'string' }, // names with commas between them; by default all
  },
});

// Without retries: one would hide the failure that a test looks for.
export const options = (key = args.key, defaultHeaders = {}) => ({
  baseURL: args.url,
  apiKey: key,
  defaultHeaders,
  maxRetries: 0,
  timeout: (LIMIT_S - 10) * 1000,
});

export const wrongKey = () => `${args.key.slice(0, -4)}AAAA`;

/** The error of a call that has to fail with this one. */
export async function refused(kind, call) {
  try {
    await call();
  } catch (e) {
    if (e instanceof kind) return e;
    throw e;
  }
  assert.fail(`it was not refused with ${kind.name}`);
}

/** Appends what is not the same as the last. */
export function dedup(list, one) {
  if (list.at(-1) !== one) list.push(one);
}

export async function run(sdk, version, scenarios) {
  const limit = setTimeout(() => {
    console.error(`${sdk}: not done after ${LIMIT_S} s`);
    process.exit(1);
  }, LIMIT_S * 1000);
  for (const name of args.scenarios?.split(',') ?? Object.keys(scenarios)) {
    let found;
    try {
      found = await scenarios[name]();
    } catch (e) {
      console.error(e);
      console.error(`${sdk}: scenario ${name} failed`);
      process.exit(1);
    }
    console.log(JSON.stringify({ scenario: name, sdk, version, ...found }));
  }
  clearTimeout(limit);
}
