#!/usr/bin/env python3
"""Runs the official Anthropic Python SDK (venv `py1`) through everything that a model server offers it.

    llm_anthropic.py --url http://… --key KEY --model MODEL [--scenarios a,b]
"""

import anthropic

from llm_scenarios import (
    DYING,
    IMAGE,
    LIMIT_S,
    PROMPT,
    QUESTION,
    RESULT,
    RESULTS,
    SYSTEM,
    WEATHER,
    arguments,
    check,
    refused,
    run,
)

MESSAGES = [{"role": "user", "content": PROMPT}]
TOOL = {"name": "weather", "input_schema": WEATHER}


def client(key: str | None = None, headers: dict | None = None) -> anthropic.Anthropic:
    # Without retries: one would hide the failure that a test looks for.
    return anthropic.Anthropic(
        base_url=args.url,
        api_key=key or args.key,
        default_headers=headers,
        max_retries=0,
        timeout=LIMIT_S - 10,
    )


def usage_of(usage) -> dict:
    return {
        "input": usage.input_tokens,
        "output": usage.output_tokens,
        "cached": usage.cache_read_input_tokens or 0,
        "written": usage.cache_creation_input_tokens or 0,
    }


def text_of(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def described(message) -> dict:
    check(message.type == "message" and message.role == "assistant" and message.id, f"a strange one: {message}")
    return {"text": text_of(message), "stop": message.stop_reason, "usage": usage_of(message.usage)}


def message_plain() -> dict:
    return described(api.messages.create(model=args.model, max_tokens=100, system=SYSTEM, messages=MESSAGES))


def message_stream() -> dict:
    text, pieces = "", 0
    with api.messages.stream(model=args.model, max_tokens=100, system=SYSTEM, messages=MESSAGES) as stream:
        for piece in stream.text_stream:
            text += piece
            pieces += 1
        message = stream.get_final_message()
    check(text == text_of(message) and pieces > 1, f"the text did not come in pieces: {message}")
    return described(message)


def message_stream_raw() -> dict:
    kinds = []
    with api.messages.create(
        model=args.model, max_tokens=100, system=SYSTEM, messages=MESSAGES, stream=True
    ) as stream:
        for event in stream:
            # The SDK keeps pings to itself.
            if kinds[-1:] != [event.type]:
                kinds.append(event.type)
    return {"events": kinds}


def with_result(message) -> list:
    """The conversation after the call of the tool that `message` makes; its blocks go back as they came."""
    call = next(block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]


def round_trip(ask) -> dict:
    first = ask([{"role": "user", "content": QUESTION}])
    call = next(block for block in first.content if block.type == "tool_use")
    second = ask(with_result(first))
    return {
        "called": call.name,
        "arguments": call.input,
        "stop": first.stop_reason,
        "text": text_of(second),
        "usage": [usage_of(first.usage), usage_of(second.usage)],
    }


def message_tools() -> dict:
    return round_trip(
        lambda messages: api.messages.create(
            model=args.model, max_tokens=100, messages=messages, tools=[TOOL]
        )
    )


def message_tools_stream() -> dict:
    def ask(messages: list):
        with api.messages.stream(
            model=args.model, max_tokens=100, messages=messages, tools=[TOOL]
        ) as stream:
            return stream.get_final_message()

    return round_trip(ask)


def message_thinking() -> dict:
    thinking = {"type": "adaptive"}
    found = []

    def ask(messages: list):
        with api.messages.stream(
            model=args.model, max_tokens=2000, messages=messages, tools=[TOOL], thinking=thinking
        ) as stream:
            message = stream.get_final_message()
        found.extend(block for block in message.content if block.type == "thinking")
        return message

    question = [{"role": "user", "content": f"{QUESTION} #reasoning=4"}]
    first = ask(question)
    # The signature goes back with the thinking, and is checked.
    second = ask(question + with_result(first)[1:])
    check(len(found) == 1 and found[0].signature, f"a strange thinking: {found}")
    return {"thinking": found[0].thinking, "text": text_of(second), "usage": usage_of(first.usage)}


def count_tokens() -> dict:
    counted = api.messages.count_tokens(model=args.model, system=SYSTEM, messages=MESSAGES, tools=[TOOL])
    return {"input": counted.input_tokens}


def models() -> dict:
    listed = [model.id for model in api.models.list()]
    one = api.models.retrieve(args.model)
    check(one.type == "model" and one.created_at and one.display_name, f"a strange model: {one}")
    return {"models": listed, "retrieved": one.id}


def message_tools_parallel() -> dict:
    asked = [{"role": "user", "content": f"{QUESTION} #calls=2"}]
    with api.messages.stream(model=args.model, max_tokens=100, messages=asked, tools=[TOOL]) as stream:
        first = stream.get_final_message()
    calls = [block for block in first.content if block.type == "tool_use"]
    check(len({call.id for call in calls}) == 2, f"two calls have two ids: {calls}")
    # In the order of the calls, and both in one turn.
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": result}
        for call, result in zip(calls, RESULTS)
    ]
    then = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = api.messages.create(model=args.model, max_tokens=100, messages=then, tools=[TOOL])
    return {
        "called": [call.name for call in calls],
        "stop": first.stop_reason,
        "text": text_of(second),
        "usage": usage_of(second.usage),
    }


def short(max_tokens: int, **options) -> dict:
    asked = [{"role": "user", "content": "one two three four"}]
    return described(api.messages.create(model=args.model, max_tokens=max_tokens, messages=asked, **options))


def message_length() -> dict:
    return short(2)


def message_stop() -> dict:
    return short(100, stop_sequences=["three"])


def message_image() -> dict:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    content = [{"type": "text", "text": "What is this"}, {"type": "image", "source": source}]
    asked = [{"role": "user", "content": content}]
    return described(api.messages.create(model=args.model, max_tokens=100, messages=asked))


def message_stream_dies() -> dict:
    text = ""

    def read() -> None:
        nonlocal text
        asked = [{"role": "user", "content": DYING}]
        with api.messages.stream(model=args.model, max_tokens=100, messages=asked) as stream:
            for piece in stream.text_stream:
                text += piece

    e = refused(anthropic.APIError, read)
    return {"text": text, "type": e.type}


def message_of_old() -> dict:
    """As the SDKs before October 2026 asked: an older version, another header for the key, sampling parameters."""
    headers = {"x-api-key": args.key, "Authorization": anthropic.omit, "anthropic-version": "2023-06-01"}
    with client(headers=headers) as old:
        return described(
            old.messages.create(
                model=args.model,
                max_tokens=100,
                system=SYSTEM,
                messages=MESSAGES,
                extra_body={"temperature": 0.5},
            )
        )


def error(e) -> dict:
    return {"error": type(e).__name__, "status": e.status_code, "type": e.type}


def unknown_model() -> dict:
    def ask(model: str):
        return api.messages.create(model=model, max_tokens=100, messages=MESSAGES)

    return error(refused(anthropic.NotFoundError, lambda: ask("no-such-model")))


def bad_key() -> dict:
    with client(args.key[:-4] + "AAAA") as stranger:
        return error(
            refused(
                anthropic.AuthenticationError,
                lambda: stranger.messages.create(model=args.model, max_tokens=100, messages=MESSAGES),
            )
        )


SCENARIOS = [
    message_plain,
    message_stream,
    message_stream_raw,
    message_tools,
    message_tools_stream,
    message_tools_parallel,
    message_length,
    message_stop,
    message_image,
    message_stream_dies,
    message_thinking,
    message_of_old,
    count_tokens,
    models,
    unknown_model,
    bad_key,
]

if __name__ == "__main__":
    args = arguments()
    with client() as api:
        run("anthropic-py", anthropic.__version__, {one.__name__: one for one in SCENARIOS}, args.scenarios)
