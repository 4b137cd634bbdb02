#!/usr/bin/env python3
"""The official Python SDK's own way to a token, 1.x (venv `py1`) or 2.x (venv `py2`).

    mcp_oauth_py.py --url http://…/mcp --issuer http://… --tool NAME

Knows a URL and the credentials of a client, nothing else: the challenge has to lead to the metadata of the resource, that
to the issuer, and its token has to open the resource. Then lists the tools, calls one, and prints one JSON line.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import json

LIMIT_S = 40
VERSION = importlib.metadata.version("mcp")


class Storage:
    """Tokens in memory."""

    def __init__(self) -> None:
        self.tokens = None
        self.client = None

    async def get_tokens(self):
        return self.tokens

    async def set_tokens(self, tokens) -> None:
        self.tokens = tokens

    async def get_client_info(self):
        return self.client

    async def set_client_info(self, client) -> None:
        self.client = client


def http_client(storage: Storage, seen: list[str]):
    from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider

    if VERSION.startswith("1."):
        import httpx
    else:
        import httpx2 as httpx

    provider = ClientCredentialsOAuthProvider(
        server_url=args.url, storage=storage, client_id="tour", client_secret="s3cret", issuer=args.issuer
    )

    async def watch(response) -> None:
        request = response.request
        seen.append(f"{response.status_code} {request.method} {request.url.path}")

    return httpx.AsyncClient(auth=provider, timeout=LIMIT_S, event_hooks={"response": [watch]})


@contextlib.asynccontextmanager
async def connect(http):
    from mcp.client.streamable_http import streamable_http_client

    if VERSION.startswith("1."):
        from mcp import ClientSession

        async with (
            streamable_http_client(args.url, http_client=http) as (reader, writer, _),
            ClientSession(reader, writer) as session,
        ):
            await session.initialize()
            yield session
    else:
        from mcp import Client

        async with Client(streamable_http_client(args.url, http_client=http)) as client:
            yield client


async def main() -> dict:
    storage, seen = Storage(), []
    async with http_client(storage, seen) as http, connect(http) as session:
        tools = [tool.name for tool in (await session.list_tools()).tools]
        result = await session.call_tool(args.tool, {"message": "hello"})
        answer = result.model_dump(by_alias=True, mode="json", exclude_none=True)
    return {
        "version": VERSION,
        "tools": tools,
        "failed": bool(answer.get("isError")),
        "scope": storage.tokens.scope,
        "unauthorized": sum(line.startswith("401 ") for line in seen),
    }


parser = argparse.ArgumentParser(description="Get a token and use it")
parser.add_argument("--url", required=True)
parser.add_argument("--issuer", required=True)
parser.add_argument("--tool", required=True)
args = parser.parse_args()
print(json.dumps(asyncio.run(asyncio.wait_for(main(), LIMIT_S))))
