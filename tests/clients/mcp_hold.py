#!/usr/bin/env python3
"""Holds one MCP session with the Python SDK 1.x (venv `py1`) and calls a tool again and again.

    mcp_hold.py --url http://…/mcp --key KEY --calls N --pace-ms M

For tests that end a replica meanwhile. Writes `N ok` or `N failed: …` to stderr after each call, so that the test knows
when to strike, and one JSON line to stdout at the end. A failed call is counted and the next one is made on the same
session; what is too many is the test's to say. Exits with 1 if the session could not be opened.
"""

import argparse
import asyncio
import faulthandler
import importlib.metadata
import json
import sys
import time
from datetime import timedelta

import httpx
from mcp import ClientSession, McpError
from mcp.client.streamable_http import streamable_http_client

CALL_LIMIT_S = 10  # an answer that was lost with its replica never comes


class Patient(httpx.AsyncHTTPTransport):
    """Turns a failed exchange into a JSON-RPC error for that one call. Left alone, SDK 1.x takes a refused connection
    or a 5xx answer as the end of the whole client, and this test is about whether the *session* survives."""

    initializes = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.method == "POST" else {}
        self.initializes += body.get("method") == "initialize"
        if body.get("method") != "tools/call":
            return await super().handle_async_request(request)
        try:
            response = await super().handle_async_request(request)
            if response.status_code < 500:
                return response
            await response.aclose()
            failure = f"HTTP {response.status_code}"
        except httpx.TransportError as e:
            failure = f"{type(e).__name__}: {e}"
        error = {"code": -32000, "message": failure}
        return httpx.Response(200, json={"jsonrpc": "2.0", "id": body["id"], "error": error})


async def call(session: ClientSession, number: int) -> str | None:
    """None, or what went wrong."""
    message = f"call {number}"  # its own, so that another call's answer is noticed
    limit = timedelta(seconds=CALL_LIMIT_S)
    try:
        result = await session.call_tool(args.tool, {"message": message}, read_timeout_seconds=limit)
    except McpError as e:
        return str(e)
    said = getattr(result.content[0], "text", None) if result.content else None
    return None if said == f"Echo: {message}" and not result.isError else f"answered {said!r}"


async def run() -> dict:
    transport = Patient()
    errors, slowest = [], 0.0
    headers = {"Authorization": f"Bearer {args.key}"}
    async with (
        httpx.AsyncClient(headers=headers, timeout=args.limit_s, transport=transport) as http,
        streamable_http_client(args.url, http_client=http) as (reader, writer, session_id),
        ClientSession(reader, writer) as session,
    ):
        protocol = (await session.initialize()).protocolVersion
        opened = session_id()
        await session.list_tools()  # else the SDK lists by itself, before it checks the first call's result
        for number in range(1, args.calls + 1):
            started = time.monotonic()
            if error := await call(session, number):
                errors.append({"call": number, "error": error})
            slowest = max(slowest, time.monotonic() - started)
            print(f"{number} failed: {error}" if error else f"{number} ok", file=sys.stderr, flush=True)
            await asyncio.sleep(args.pace_ms / 1000)
        same = session_id() == opened
    return {
        "sdk": "mcp-py",
        "version": importlib.metadata.version("mcp"),
        "protocol": protocol,
        "calls": args.calls,
        "ok": args.calls - len(errors),
        "errors": errors,
        "initializes": transport.initializes,
        "same_session": same and opened is not None,
        "slowest_ms": round(slowest * 1000),
    }


def main() -> None:
    # Last resort, should the SDK hang while it closes: the timeout below ends everything else with a message.
    faulthandler.dump_traceback_later(args.limit_s + 5, exit=True)
    try:
        line = asyncio.run(asyncio.wait_for(run(), args.limit_s))
    except BaseException as e:
        while isinstance(e, BaseExceptionGroup):
            e = e.exceptions[0]
        sys.exit(f"mcp_hold: not done within {args.limit_s} s" if isinstance(e, TimeoutError) else f"mcp_hold: {e!r}")
    print(json.dumps(line))


parser = argparse.ArgumentParser(description="Hold one MCP session and keep calling")
parser.add_argument("--url", required=True)
parser.add_argument("--key", required=True)
parser.add_argument("--calls", type=int, required=True)
parser.add_argument("--pace-ms", type=int, required=True)
parser.add_argument("--tool", default="everything__echo", help="takes `message` and echoes it")
parser.add_argument("--limit-s", type=int, default=55, help="for the whole run")

if __name__ == "__main__":
    args = parser.parse_args()
    main()
