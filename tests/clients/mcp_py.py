#!/usr/bin/env python3
"""A tour of an MCP server with the official Python SDK: whichever runs it, 1.x (venv `py1`) or 2.x (venv `py2`).

    mcp_py.py --url http://…/mcp --key KEY [--pause-file F]

2.x runs in its default mode: it asks in 2026-07-28 first and falls back to `initialize`. Connects, lists, makes ten
calls that succeed and one that must fail, reads resources, gets prompts, ends the session, prints one JSON line. The
upstreams are `server-everything` twice (Streamable HTTP and stdio) and `mcp-server-time`. Against `server-everything`
itself: `--prefix-http '' --skip-stdio --skip-time`.

With `--pause-file F` it creates F halfway through the calls and goes on when the caller has deleted it: whoever runs
this can end a replica in between.
"""

import argparse
import asyncio
import base64
import contextlib
import faulthandler
import importlib.metadata
import json
import pathlib
import sys

LIMIT_S = 60
VERSION = importlib.metadata.version("mcp")


class Failed(Exception):
    """What the server did wrong, in words."""


def check(ok: object, message: str) -> None:
    if not ok:
        raise Failed(message)


class Wire:
    """What passed over HTTP, seen from below the SDK: neither version says whether the session was really ended, nor
    always which request an error belongs to."""

    def __init__(self) -> None:
        self.session_id: str | None = None
        self.deleted: int | None = None
        self.last = "nothing was answered"

    async def watch(self, response) -> None:
        self.session_id = response.headers.get("mcp-session-id") or self.session_id
        request = response.request
        if request.method == "DELETE":
            self.deleted = response.status_code
        body = json.loads(request.content or b"{}")
        what = [request.method, body.get("method"), body.get("params", {}).get("name")]
        self.last = f"last answer: {response.status_code} to {' '.join(filter(None, what))}"


wire = Wire()


@contextlib.asynccontextmanager
async def connect(http):
    """Yields a session and its negotiated version. Both versions of `session` have the same methods."""
    if VERSION.startswith("1."):
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        async with (
            streamable_http_client(args.url, http_client=http) as (reader, writer, _),
            ClientSession(reader, writer) as session,
        ):
            yield session, (await session.initialize()).protocolVersion
    else:
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        async with Client(streamable_http_client(args.url, http_client=http)) as client:
            yield client, client.protocol_version


def http_client():
    if VERSION.startswith("1."):
        import httpx
    else:
        import httpx2 as httpx
    headers = {"Authorization": f"Bearer {args.key}"}
    return httpx.AsyncClient(headers=headers, timeout=LIMIT_S, event_hooks={"response": [wire.watch]})


def plain(model) -> dict:
    """A result as it stood on the wire, so that the checks below are the same for both versions."""
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)


async def every(page_of, field: str) -> list[dict]:
    """All pages of a list."""
    items, cursor = [], None
    while True:
        page = plain(await (page_of(cursor=cursor) if cursor else page_of()))
        items += page[field]
        cursor = page.get("nextCursor")
        if not cursor:
            return items


class Tour:
    def __init__(self, session) -> None:
        self.session = session
        self.calls = 0
        self.progress: list[float] = []
        # A connection `c` owns tools `c__…` and resources `c+…`; without a prefix this is the upstream itself.
        self.uri_prefix = args.prefix_http.removesuffix("__") + "+" if args.prefix_http else ""

    async def call(self, name: str, arguments: dict, **options) -> dict:
        result = plain(await self.session.call_tool(name, arguments, **options))
        check(not result.get("isError"), f"{name} answered with an error: {result.get('content')}")
        self.calls += 1
        return result

    async def call_text(self, name: str, arguments: dict) -> str:
        return (await self.call(name, arguments))["content"][0]["text"]

    async def read(self, uri: str) -> dict:
        check(uri.startswith(self.uri_prefix + "demo://"), f"{uri} does not start with {self.uri_prefix}demo://")
        contents = plain(await self.session.read_resource(uri))["contents"]
        check([c["uri"] for c in contents] == [uri], f"reading {uri} returned {contents}")
        check(contents[0].get("text") or contents[0].get("blob"), f"{uri} is empty")
        return contents[0]

    async def first_half(self) -> None:
        http = args.prefix_http
        said = await self.call_text(http + "echo", {"message": "grüße"})
        check(said == "Echo: grüße", f"echo said {said!r}")
        said = await self.call_text(http + "get-sum", {"a": 19, "b": 23})
        check("42" in said, f"get-sum said {said!r}")
        # The SDK checks `structuredContent` against the listed output schema by itself.
        weather = await self.call(http + "get-structured-content", {"location": "Chicago"})
        structured = weather["structuredContent"]
        check(structured == json.loads(weather["content"][0]["text"]), f"structured content is {structured}")
        await self.long_running(http + "trigger-long-running-operation")
        links = (await self.call(http + "get-resource-links", {"count": 2}))["content"]
        uris = [block["uri"] for block in links if block["type"] == "resource_link"]
        check(len(uris) == 2, f"get-resource-links returned {len(uris)} links")
        for uri in uris:
            await self.read(uri)

    async def long_running(self, name: str) -> None:
        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            self.progress.append(progress)

        await self.call(name, {"duration": 1, "steps": 4}, progress_callback=on_progress)
        check(self.progress == [1, 2, 3, 4], f"progress was {self.progress}, not 1 to 4")

    async def second_half(self) -> None:
        http = args.prefix_http
        reference = await self.call(http + "get-resource-reference", {"resourceType": "Text", "resourceId": 7})
        resource = next(block["resource"] for block in reference["content"] if block["type"] == "resource")
        await self.read(resource["uri"])
        annotated = await self.call(http + "get-annotated-message", {"messageType": "error", "includeImage": True})
        annotations = annotated["content"][0].get("annotations")
        check(annotations == {"priority": 1, "audience": ["user", "assistant"]}, f"annotations are {annotations}")
        picture = (await self.call(http + "get-tiny-image", {}))["content"][1]
        check(picture["mimeType"] == "image/png", f"the image is {picture['mimeType']}")
        check(base64.b64decode(picture["data"]).startswith(b"\x89PNG"), "the image is no PNG")
        if not args.skip_time:
            noon = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            said = await self.call_text(args.prefix_time + "convert_time", noon)
            check("T21:00" in said, f"convert_time said {said!r}")
        if not args.skip_stdio:
            said = await self.call_text(args.prefix_stdio + "echo", {"message": "over stdio"})
            check(said == "Echo: over stdio", f"echo over stdio said {said!r}")

    async def unknown_tool(self) -> str:
        """Either spelling of failure is right: a JSON-RPC error, or a result with `isError`."""
        try:
            result = plain(await self.session.call_tool(args.prefix_http + "no-such-tool", {}))
        except Exception as e:  # McpError in 1.x, MCPError in 2.x
            check(hasattr(e, "error"), f"calling an unknown tool ended with {e!r}")
            return f"{e.error.code}: {e.error.message}"
        check(result.get("isError"), f"calling an unknown tool succeeded: {result}")
        return result["content"][0]["text"]

    async def resources(self) -> None:
        listed = [resource["uri"] for resource in await every(self.session.list_resources, "resources")]
        uri = self.uri_prefix + "demo://resource/static/document/architecture.md"
        check(uri in listed, f"{uri} is not listed: {listed}")
        check((await self.read(uri))["mimeType"] == "text/markdown", f"{uri} is no markdown")
        templates = await every(self.session.list_resource_templates, "resourceTemplates")
        wanted = self.uri_prefix + "demo://resource/dynamic/text/{resourceId}"
        check(wanted in [t["uriTemplate"] for t in templates], f"{wanted} is not among the templates: {templates}")

    async def prompts(self) -> None:
        listed = [prompt["name"] for prompt in await every(self.session.list_prompts, "prompts")]
        name = args.prefix_http + "args-prompt"
        check(name in listed, f"{name} is not listed: {listed}")
        said = plain(await self.session.get_prompt(name, {"city": "Oslo"}))["messages"][0]["content"]["text"]
        check("Oslo" in said, f"{name} said {said!r}")
        embedding = {"resourceType": "Text", "resourceId": "3"}
        messages = plain(await self.session.get_prompt(args.prefix_http + "resource-prompt", embedding))["messages"]
        await self.read(messages[1]["content"]["resource"]["uri"])


async def pause() -> None:
    args.pause_file.touch()
    while args.pause_file.exists():
        await asyncio.sleep(0.05)


async def session_is_gone(http) -> None:
    headers = {"mcp-session-id": wire.session_id, "accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    status = (await http.post(args.url, json=body, headers=headers)).status_code
    check(wire.deleted in (200, 204), f"DELETE of the session was answered with {wire.deleted}")
    # The specification asks for 404; `server-everything` itself answers 400.
    check(status in (400, 404), f"the session still answers after its DELETE, with {status}")


async def run() -> dict:
    async with http_client() as http:
        async with connect(http) as (session, protocol):
            tour = Tour(session)
            tools = [tool["name"] for tool in await every(session.list_tools, "tools")]
            check(args.prefix_http + "echo" in tools, f"{args.prefix_http}echo is not listed: {tools}")
            await tour.first_half()
            if args.pause_file:
                await pause()
            await tour.second_half()
            error = await tour.unknown_tool()
            await tour.resources()
            await tour.prompts()
        if wire.session_id:  # 2026-07-28 has no sessions
            await session_is_gone(http)
    return {
        "sdk": "mcp-py",
        "version": VERSION,
        "protocol": protocol,
        "tools": len(tools),
        "calls": tour.calls,
        "error": error,
        "resource": True,
        "prompt": True,
        "progress": len(tour.progress),
        "session": wire.session_id is not None,
        "ended": True,
    }


def reason(error: BaseException) -> str:
    """The failure itself, out of the groups that the SDK's task groups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"not done within {LIMIT_S - 5} s ({wire.last})"
    return str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error} ({wire.last})"


def main() -> None:
    # Last resort, should the SDK hang while it closes: the timeout below ends everything else with a message.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        line = asyncio.run(asyncio.wait_for(run(), LIMIT_S - 5))
    except BaseException as e:
        sys.exit(f"mcp_py ({VERSION}): {reason(e)}")
    print(json.dumps(line))


parser = argparse.ArgumentParser(description="Tour an MCP server with the Python SDK")
parser.add_argument("--url", required=True)
parser.add_argument("--key", required=True)
parser.add_argument("--pause-file", type=pathlib.Path)
parser.add_argument("--prefix-http", default="everything__")
parser.add_argument("--prefix-stdio", default="local__")
parser.add_argument("--prefix-time", default="time__")
parser.add_argument("--skip-stdio", action="store_true", help="there is no stdio connection")
parser.add_argument("--skip-time", action="store_true", help="there is no time connection")

if __name__ == "__main__":
    args = parser.parse_args()
    main()
