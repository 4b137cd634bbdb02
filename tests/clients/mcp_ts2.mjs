// Tours an MCP server with the TypeScript SDK 2.x. It asks in 2026-07-28 first (`server/discover`) and falls back to
// `initialize`; the SDK's own default would be not to ask. What it does: mcp_ts_tour.mjs.
//
//     mcp_ts2.mjs --url http://…/mcp --key KEY [--pause-file F]

import { load, main, versionOf } from './mcp_ts_tour.mjs';

await main('mcp_ts2', async () => {
  const { Client, StreamableHTTPClientTransport } = await load('@modelcontextprotocol/client');
  return {
    version: versionOf('@modelcontextprotocol/client'),
    async connect(url, options) {
      const client = new Client({ name: 'obol-test', version: '1.0.0' }, { versionNegotiation: { mode: 'auto' } });
      const transport = new StreamableHTTPClientTransport(url, options);
      await client.connect(transport);
      return {
        client,
        transport,
        protocol: () => client.getNegotiatedProtocolVersion(),
        callTool: (params, extra) => client.callTool(params, extra),
      };
    },
  };
});
