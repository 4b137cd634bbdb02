// A tour of an MCP server, the same as mcp_py.py's, shared by the two TypeScript SDKs: mcp_ts1.mjs and mcp_ts2.mjs each
// hand over how they connect. Prints one JSON line, or a message on stderr and exit code 1.

import assert from 'node:assert/strict';
import { existsSync, writeFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';

const LIMIT_S = 60;

export { load, versionOf } from './installed.mjs';

const { values: args } = parseArgs({
  options: {
    url: { type: 'string' },
    key: { type: 'string' },
    'pause-file': { type: 'string' },
    'prefix-http': { type: 'string', default: 'everything__' },
    'prefix-stdio': { type: 'string', default: 'local__' },
    'prefix-time': { type: 'string', default: 'time__' },
    'skip-stdio': { type: 'boolean', default: false },
    'skip-time': { type: 'boolean', default: false },
  },
});

const http = args['prefix-http'];
// A connection `c` owns tools `c__…` and resources `c+…`; without a prefix this is the upstream itself.
const uriPrefix = (http && `${http.replace(/__$/, '')}+`) + 'demo://';

class Tour {
  calls = 0;
  progress = [];

  constructor(client, callTool) {
    this.client = client;
    this.callTool = callTool;
  }

  async call(name, input, options) {
    const result = await this.callTool({ name, arguments: input }, options);
    assert.ok(!result.isError, `${name} answered with an error: ${JSON.stringify(result.content)}`);
    this.calls += 1;
    return result;
  }

  async callText(name, input) {
    return (await this.call(name, input)).content[0].text;
  }

  async read(uri) {
    assert.ok(uri.startsWith(uriPrefix), `${uri} does not start with ${uriPrefix}`);
    const { contents } = await this.client.readResource({ uri });
    assert.deepEqual(contents.map((c) => c.uri), [uri], `reading ${uri}`);
    assert.ok(contents[0].text || contents[0].blob, `${uri} is empty`);
    return contents[0];
  }

  async firstHalf() {
    assert.equal(await this.callText(`${http}echo`, { message: 'grüße' }), 'Echo: grüße');
    assert.match(await this.callText(`${http}get-sum`, { a: 19, b: 23 }), /42/);
    // The SDK checks `structuredContent` against the listed output schema by itself.
    const weather = await this.call(`${http}get-structured-content`, { location: 'Chicago' });
    assert.deepEqual(weather.structuredContent, JSON.parse(weather.content[0].text));
    await this.call(`${http}trigger-long-running-operation`, { duration: 1, steps: 4 }, {
      onprogress: ({ progress }) => this.progress.push(progress),
    });
    assert.deepEqual(this.progress, [1, 2, 3, 4], 'progress of the long-running call');
    const links = (await this.call(`${http}get-resource-links`, { count: 2 })).content.filter((b) => b.type === 'resource_link');
    assert.equal(links.length, 2, 'number of resource links');
    for (const { uri } of links) await this.read(uri);
  }

  async secondHalf() {
    const reference = await this.call(`${http}get-resource-reference`, { resourceType: 'Text', resourceId: 7 });
    await this.read(reference.content.find((b) => b.type === 'resource').resource.uri);
    const annotated = await this.call(`${http}get-annotated-message`, { messageType: 'error', includeImage: true });
    assert.deepEqual(annotated.content[0].annotations, { priority: 1, audience: ['user', 'assistant'] });
    const picture = (await this.call(`${http}get-tiny-image`, {})).content[1];
    assert.equal(picture.mimeType, 'image/png');
    assert.equal(Buffer.from(picture.data, 'base64').toString('latin1', 1, 4), 'PNG');
    if (!args['skip-time']) {
      const noon = { source_timezone: 'UTC', time: '12:00', target_timezone: 'Asia/Tokyo' };
      assert.match(await this.callText(`${args['prefix-time']}convert_time`, noon), /T21:00/);
    }
    if (!args['skip-stdio']) {
      assert.equal(await this.callText(`${args['prefix-stdio']}echo`, { message: 'over stdio' }), 'Echo: over stdio');
    }
  }

  /** Either spelling of failure is right: a JSON-RPC error, or a result with `isError`. */
  async unknownTool() {
    const name = `${http}no-such-tool`;
    const result = await this.callTool({ name, arguments: {} }).catch((e) => {
      if (typeof e.code !== 'number') throw e; // not a JSON-RPC error
      return { isError: true, content: [{ text: `${e.code}: ${e.message}` }] };
    });
    assert.ok(result.isError, `calling an unknown tool succeeded: ${JSON.stringify(result)}`);
    return result.content[0].text;
  }

  async resources() {
    const uri = `${uriPrefix}resource/static/document/architecture.md`;
    const listed = await every((page) => this.client.listResources(page), 'resources');
    assert.ok(listed.some((r) => r.uri === uri), `${uri} is not listed: ${listed.map((r) => r.uri)}`);
    assert.equal((await this.read(uri)).mimeType, 'text/markdown');
    const template = `${uriPrefix}resource/dynamic/text/{resourceId}`;
    const templates = await every((page) => this.client.listResourceTemplates(page), 'resourceTemplates');
    assert.ok(templates.some((t) => t.uriTemplate === template), `${template} is not among the templates`);
  }

  async prompts() {
    const listed = await every((page) => this.client.listPrompts(page), 'prompts');
    const name = `${http}args-prompt`;
    assert.ok(listed.some((p) => p.name === name), `${name} is not listed: ${listed.map((p) => p.name)}`);
    const said = await this.client.getPrompt({ name, arguments: { city: 'Oslo' } });
    assert.match(said.messages[0].content.text, /Oslo/);
    const embedding = { resourceType: 'Text', resourceId: '3' };
    const { messages } = await this.client.getPrompt({ name: `${http}resource-prompt`, arguments: embedding });
    await this.read(messages[1].content.resource.uri);
  }
}

/** All pages of a list. */
async function every(pageOf, field) {
  const items = [];
  for (let cursor; ; ) {
    const page = await pageOf(cursor ? { cursor } : {});
    items.push(...page[field]);
    cursor = page.nextCursor;
    if (!cursor) return items;
  }
}

/** Creates the file and goes on when the caller has deleted it: whoever runs this can end a replica in between. */
async function pause(file) {
  writeFileSync(file, '');
  while (existsSync(file)) await sleep(50);
}

/** Ends the session and asks once more with its id. 2026-07-28 has no sessions: then there is nothing to end. */
async function end(client, transport) {
  const sessionId = transport.sessionId;
  if (sessionId) await transport.terminateSession(); // throws unless the answer is 2xx or 405
  await client.close();
  if (!sessionId) return false;
  const { status } = await fetch(args.url, {
    method: 'POST',
    headers: {
      authorization: `Bearer ${args.key}`,
      'mcp-session-id': sessionId,
      'content-type': 'application/json',
      accept: 'application/json, text/event-stream',
    },
    body: JSON.stringify({ jsonrpc: '2.0', id: 1, method: 'tools/list' }),
  });
  // The specification asks for 404; `server-everything` itself answers 400.
  assert.ok(status === 400 || status === 404, `the session still answers after its DELETE, with ${status}`);
  return true;
}

async function tourOf({ version, connect }) {
  const { client, transport, protocol, callTool } = await connect(new URL(args.url), {
    requestInit: { headers: { authorization: `Bearer ${args.key}` } },
  });
  const negotiated = protocol(); // the 2.x client forgets it when it closes
  const tour = new Tour(client, callTool);
  const tools = await every((page) => client.listTools(page), 'tools');
  assert.ok(tools.some((t) => t.name === `${http}echo`), `${http}echo is not listed: ${tools.map((t) => t.name)}`);
  await tour.firstHalf();
  if (args['pause-file']) await pause(args['pause-file']);
  await tour.secondHalf();
  const error = await tour.unknownTool();
  await tour.resources();
  await tour.prompts();
  const session = await end(client, transport);
  return {
    sdk: 'mcp-ts',
    version,
    protocol: negotiated,
    tools: tools.length,
    calls: tour.calls,
    error,
    resource: true,
    prompt: true,
    progress: tour.progress.length,
    session,
    ended: true,
  };
}

/** Runs the tour and ends the process: open streams of the SDK must not keep it alive. */
export async function main(name, sdk) {
  const fail = (message) => {
    console.error(`${name}: ${message}`);
    process.exit(1);
  };
  setTimeout(() => fail(`not done within ${LIMIT_S} s`), LIMIT_S * 1000).unref();
  if (!args.url || !args.key) fail('--url and --key are required');
  try {
    const line = await tourOf(await sdk());
    process.stdout.write(`${JSON.stringify(line)}\n`, () => process.exit(0));
  } catch (e) {
    fail(`${e.name}: ${e.message}${e.cause ? ` (${e.cause.message})` : ''} ${e.stack?.match(/mcp_ts_tour\.mjs:\d+/)?.[0] ?? ''}`);
  }
}
