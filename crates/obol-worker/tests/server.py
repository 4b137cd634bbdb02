"""An MCP server on stdio that misbehaves when it is told to."""
import json, os, signal, subprocess, sys, time

if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def send(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()

def text(ident, value):
    send({"jsonrpc": "2.0", "id": ident, "result": {"content": [{"type": "text", "text": str(value)}]}})

def call(ident, params):
    name, meta = params["name"], params.get("_meta", {})
    if name == "echo":
        text(ident, json.dumps(params.get("arguments")))
    elif name == "noise":
        print("Listening on nothing at all")
        print("{ not json")
        print("{}")
        text(ident, "after the noise")
    elif name == "stderr":
        for n in range(16):
            sys.stderr.write("x" * 65536 + "\n")
        text(ident, "after the flood")
    elif name == "crash":
        print("Traceback: out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    elif name == "huge":
        sys.stdout.write('{"jsonrpc":"2.0","id":%d,"result":"' % ident + "y" * (1 << 20) + '"}\n')
        sys.stdout.flush()
    elif name == "huge_id_last":
        sys.stdout.write('{"result":{"text":"' + "y" * (1 << 20) + '"},"jsonrpc":"2.0","id":%d}\n' % ident)
        sys.stdout.flush()
    elif name == "huge_notification":
        send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "y" * (1 << 20)}})
        text(ident, "after the huge line")
    elif name == "nan":
        send({"jsonrpc": "2.0", "id": ident, "result": {"score": float("nan")}})
    elif name == "hang":
        send({"jsonrpc": "2.0", "method": "notifications/progress",
              "params": {"progressToken": meta.get("progressToken"), "progress": 1}})
    elif name == "stop_reading":
        send({"jsonrpc": "2.0", "method": "notifications/progress",
              "params": {"progressToken": meta.get("progressToken"), "progress": 1}})
        time.sleep(1000)
    elif name == "grandchild":
        text(ident, subprocess.Popen(["sleep", "1000"]).pid)
    elif name == "environment":
        text(ident, json.dumps(dict(os.environ)))
    elif name == "pid":
        text(ident, os.getpid())
    elif name == "announce":
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        send({"jsonrpc": "2.0", "id": "q", "method": "ping"})
        answer = json.loads(sys.stdin.readline())
        text(ident, json.dumps(answer))

for line in sys.stdin:
    message = json.loads(line)
    ident, method = message.get("id"), message.get("method")
    if method == "initialize":
        send({"jsonrpc": "2.0", "id": ident, "result": {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "misbehaving", "version": "1"},
            "instructions": "behave"}})
    elif method == "tools/call":
        call(ident, message["params"])
    elif method == "tools/list":
        send({"jsonrpc": "2.0", "id": ident, "result": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}})
    elif method == "notifications/cancelled":
        print("cancelled", message["params"]["requestId"], file=sys.stderr, flush=True)

if os.environ.get("STUBBORN"):
    while True:
        time.sleep(1000)
