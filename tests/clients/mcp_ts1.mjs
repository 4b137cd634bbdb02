// Tours an MCP server with the TypeScript SDK 1.x, which speaks 2025-11-25 and older. What it does: mcp_ts_tour.mjs.
//
//     mcp_ts1.mjs --url http://…/mcp --key KEY [--pause-file F]

import { load, main, versionOf } from './mcp_ts_tour.mjs';

await main('mcp_ts1', async () => {
  const { Client } = await load('@modelcontextprotocol/sdk/client/index.js');
  const { StreamableHTTPClientTransport } = await load('@modelcontextprotocol/sdk/client/streamableHttp.js');
  return {
    version: versionOf('@modelcontextprotocol/sdk'),
    async connect(url, options) {
      const client = new Client({ name: 'obol-test', version: '1.0.0' });
      const transport = new StreamableHTTPClientTransport(url, options);
      await client.connect(transport);
      return {
        client,
        transport,
        protocol: () => transport.protocolVersion,
        callTool: (params, extra) => client.callTool(params, undefined, extra), // the middle one is the result's schema
      };
    },
  };
});
