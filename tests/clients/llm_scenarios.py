"""What the model clients in Python share: arguments, scenarios by name, one JSON line for each.

The TypeScript clients run the same scenarios under the same names and print the same fields (llm_scenarios.mjs), so that
a test can hold the four against each other. A scenario that raises ends the program with exit code 1.
"""

import argparse
import faulthandler
import json
import sys
import traceback

LIMIT_S = 60
SYSTEM = "Answer in one sentence."
PROMPT = "Say hello to the world #cached=8 #reasoning=3"
QUESTION = "Weather in Rome"
RESULT = "sunny, 24 degrees"
RESULTS = ["sunny", "rainy"]
DYING = "One two three four #dies_after=3"
# A pixel.
IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def check(ok: object, message: str) -> None:
    if not ok:
        raise AssertionError(message)


def refused(kind: type[Exception], call) -> Exception:
    """The error of a call that has to fail with this one."""
    try:
        call()
    except kind as e:
        return e
    raise AssertionError(f"it was not refused with {kind.__name__}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run an official SDK against a model server")
    parser.add_argument("--url", required=True, help="as the SDK takes it: with /v1 for OpenAI's, without for Anthropic's")
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--embedding-model")
    parser.add_argument("--scenarios", help="names with commas between them; by default all")
    return parser.parse_args()


def run(sdk: str, version: str, scenarios: dict, only: str | None) -> None:
    """Runs the named scenarios in order."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    for name in only.split(",") if only else scenarios:
        try:
            found = scenarios[name]()
        except Exception:
            traceback.print_exc()
            sys.exit(f"{sdk}: scenario {name} failed")
        print(json.dumps({"scenario": name, "sdk": sdk, "version": version, **found}), flush=True)
