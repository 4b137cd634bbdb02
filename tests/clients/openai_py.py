#!/usr/bin/env python3
"""Uses the gateway's LLM surface with the official OpenAI Python SDK (venv `py1`).

    openai_py.py --url http://…/v1 --key KEY --model MODEL

Lists models; asks once plainly and twice as a stream, with and without `include_usage`. Prints one JSON line.
"""

import argparse
import faulthandler
import json
import sys

import openai

LIMIT_S = 60
PROMPT = [{"role": "user", "content": "Say something."}]


class Failed(Exception):
    """What the server did wrong, in words."""


def check(ok: object, message: str) -> None:
    if not ok:
        raise Failed(message)


def check_usage(usage, where: str) -> dict:
    check(usage is not None, f"{where}: no usage")
    prompt, completion, total = usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
    check(prompt > 0 and completion > 0, f"{where}: usage is empty: {usage}")
    check(total == prompt + completion, f"{where}: {prompt} + {completion} tokens are not {total}")
    return {"prompt": prompt, "completion": completion}


def plain(client: openai.OpenAI) -> tuple[str, dict]:
    answer = client.chat.completions.create(model=args.model, messages=PROMPT)
    check(answer.choices, "plain: no choices")
    check(answer.choices[0].finish_reason, "plain: no finish reason")
    return answer.choices[0].message.content or "", check_usage(answer.usage, "plain")


def streamed(client: openai.OpenAI, where: str, **options) -> tuple[str, list, int]:
    """The text, every usage that came, and the number of chunks."""
    text, usages, chunks, finished = "", [], 0, None
    with client.chat.completions.create(model=args.model, messages=PROMPT, stream=True, **options) as stream:
        for chunk in stream:
            chunks += 1
            if chunk.usage is not None:
                check(not chunk.choices, f"{where}: the usage came in a chunk with choices")
                usages.append(chunk.usage)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finished = choice.finish_reason or finished
    check(finished, f"{where}: no finish reason")
    return text, usages, chunks


def run() -> dict:
    # Without retries: one would hide the failure that a test looks for.
    with openai.OpenAI(base_url=args.url, api_key=args.key, max_retries=0, timeout=LIMIT_S - 10) as client:
        models = [model.id for model in client.models.list()]
        check(args.model in models, f"{args.model} is not among the models: {models}")
        text, usage = plain(client)
        with_text, with_usages, chunks = streamed(client, "stream", stream_options={"include_usage": True})
        without_text, without_usages, _ = streamed(client, "stream without usage")
    for where, said in (("plain", text), ("stream", with_text), ("stream without usage", without_text)):
        check(said, f"{where}: no content")
    check(len(with_usages) == 1, f"stream: usage came {len(with_usages)} times instead of once, at the end")
    # The gateway asks its provider for usage in any case, to meter; a client that did not ask must not see it.
    check(not without_usages, f"stream without usage: usage came unasked: {without_usages}")
    return {
        "sdk": "openai-py",
        "version": openai.__version__,
        "models": len(models),
        "plain": usage,
        "stream": check_usage(with_usages[0], "stream"),
        "chunks": chunks,
        "unasked_usage": False,
    }


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        line = run()
    except Failed as e:
        sys.exit(f"openai_py: {e}")
    except openai.OpenAIError as e:
        sys.exit(f"openai_py: {type(e).__name__}: {e}")
    print(json.dumps(line))


parser = argparse.ArgumentParser(description="Use the LLM surface with the OpenAI SDK")
parser.add_argument("--url", required=True)
parser.add_argument("--key", required=True)
parser.add_argument("--model", required=True)

if __name__ == "__main__":
    args = parser.parse_args()
    main()
