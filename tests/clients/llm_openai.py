#!/usr/bin/env python3
"""Runs the official OpenAI Python SDK (venv `py1`) through everything that a model server offers it.

    llm_openai.py --url http://…/v1 --key KEY --model MODEL [--embedding-model MODEL] [--scenarios a,b]
"""

import json

import openai
from pydantic import BaseModel

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

MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}


class Forecast(BaseModel):
    city: str
    days: int
    sunny: bool


def client(key: str | None = None) -> openai.OpenAI:
    # Without retries: one would hide the failure that a test looks for.
    return openai.OpenAI(base_url=args.url, api_key=key or args.key, max_retries=0, timeout=LIMIT_S - 10)


def chat_usage(usage) -> dict | None:
    if usage is None:
        return None
    read, made = usage.prompt_tokens_details, usage.completion_tokens_details
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"the total is wrong: {usage}")
    return {
        "input": usage.prompt_tokens,
        "output": usage.completion_tokens,
        "cached": read.cached_tokens or 0 if read else 0,
        "reasoning": made.reasoning_tokens or 0 if made else 0,
    }


def usage_of(usage) -> dict:
    check(usage.total_tokens == usage.input_tokens + usage.output_tokens, f"the total is wrong: {usage}")
    return {
        "input": usage.input_tokens,
        "output": usage.output_tokens,
        "cached": usage.input_tokens_details.cached_tokens,
        "reasoning": usage.output_tokens_details.reasoning_tokens,
    }


def chat_plain() -> dict:
    answer = api.chat.completions.create(model=args.model, messages=MESSAGES)
    check(answer.object == "chat.completion" and answer.id and answer.model, f"a strange answer: {answer}")
    choice = answer.choices[0]
    check(choice.message.role == "assistant", f"a strange role: {choice}")
    return {"text": choice.message.content, "finish": choice.finish_reason, "usage": chat_usage(answer.usage)}


def streamed(**options) -> dict:
    text, finish, usages, ids, pieces = "", None, [], set(), 0
    with api.chat.completions.create(model=args.model, messages=MESSAGES, stream=True, **options) as stream:
        for chunk in stream:
            ids.add(chunk.id)
            if chunk.usage is not None:
                check(not chunk.choices, f"usage came in a chunk with choices: {chunk}")
                usages.append(chat_usage(chunk.usage))
            for choice in chunk.choices:
                text += choice.delta.content or ""
                pieces += bool(choice.delta.content)
                finish = choice.finish_reason or finish
    check(len(ids) == 1, f"one answer has one id: {ids}")
    check(pieces > 1, "the text did not come in pieces")
    return {"text": text, "finish": finish, "usage": usages}


def chat_stream() -> dict:
    return streamed()


def chat_stream_usage() -> dict:
    return streamed(stream_options={"include_usage": True})


def told(message) -> list:
    """The conversation after the call of the tool that `message` makes."""
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    made = {
        "role": "assistant",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
        ],
    }
    return [{"role": "user", "content": QUESTION}, made, result]


def called(choice) -> dict:
    call = choice.message.tool_calls[0].function
    return {"called": call.name, "arguments": json.loads(call.arguments), "finish": choice.finish_reason}


def chat_tools() -> dict:
    question = [{"role": "user", "content": QUESTION}]
    first = api.chat.completions.create(model=args.model, messages=question, tools=[CHAT_TOOL])
    choice = first.choices[0]
    then = told(choice.message)
    second = api.chat.completions.create(model=args.model, messages=then, tools=[CHAT_TOOL])
    usages = [chat_usage(first.usage), chat_usage(second.usage)]
    return {**called(choice), "text": second.choices[0].message.content, "usage": usages}


def chat_tools_stream() -> dict:
    def ask(messages: list):
        options = {"include_usage": True}
        with api.chat.completions.stream(
            model=args.model, messages=messages, tools=[CHAT_TOOL], stream_options=options
        ) as stream:
            return stream.get_final_completion()

    first = ask([{"role": "user", "content": QUESTION}])
    choice = first.choices[0]
    second = ask(told(choice.message))
    usages = [chat_usage(first.usage), chat_usage(second.usage)]
    return {**called(choice), "text": second.choices[0].message.content, "usage": usages}


def chat_tools_parallel() -> dict:
    asked = [{"role": "user", "content": f"{QUESTION} #calls=2"}]
    with api.chat.completions.stream(model=args.model, messages=asked, tools=[CHAT_TOOL]) as stream:
        first = stream.get_final_completion().choices[0]
    calls = first.message.tool_calls
    check(len({call.id for call in calls}) == 2, f"two calls have two ids: {calls}")
    made = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in calls
    ]
    # In the order of the calls, and both before anything else.
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result} for call, result in zip(calls, RESULTS)
    ]
    then = [*asked, {"role": "assistant", "content": None, "tool_calls": made}, *results]
    second = api.chat.completions.create(model=args.model, messages=then, tools=[CHAT_TOOL])
    return {
        "called": [call.function.name for call in calls],
        "finish": first.finish_reason,
        "text": second.choices[0].message.content,
        "usage": chat_usage(second.usage),
    }


def short(**options) -> dict:
    answer = api.chat.completions.create(
        model=args.model, messages=[{"role": "user", "content": "one two three four"}], **options
    )
    choice = answer.choices[0]
    return {"text": choice.message.content, "finish": choice.finish_reason, "usage": chat_usage(answer.usage)}


def chat_length() -> dict:
    return short(max_completion_tokens=2)


def chat_stop() -> dict:
    return short(stop=["three"])


def chat_image() -> dict:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    content = [{"type": "text", "text": "What is this"}, image]
    answer = api.chat.completions.create(model=args.model, messages=[{"role": "user", "content": content}])
    return {"text": answer.choices[0].message.content, "usage": chat_usage(answer.usage)}


def chat_stream_dies() -> dict:
    text = ""

    def read() -> None:
        nonlocal text
        asked = [{"role": "user", "content": DYING}]
        with api.chat.completions.create(model=args.model, messages=asked, stream=True) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    check(choice.finish_reason is None, "what died did not finish")

    e = refused(openai.APIError, read)
    check(e.message, f"an error without words: {e!r}")
    return {"text": text, "type": e.type}


def chat_parsed() -> dict:
    question = [{"role": "user", "content": QUESTION}]
    answer = api.chat.completions.parse(model=args.model, messages=question, response_format=Forecast)
    parsed = answer.choices[0].message.parsed
    check(isinstance(parsed, Forecast), f"nothing was parsed: {answer}")
    return {"parsed": parsed.model_dump(), "usage": chat_usage(answer.usage)}


def embeddings() -> dict:
    model, texts = args.embedding_model, ["hello world", "and good bye"]
    # By default the SDK asks for base64 and decodes it.
    packed = api.embeddings.create(model=model, input=texts, dimensions=8)
    plain = api.embeddings.create(model=model, input=texts, dimensions=8, encoding_format="float")
    vectors = [one.embedding for one in packed.data]
    check(vectors == [one.embedding for one in plain.data], "the two encodings differ")
    check([one.index for one in packed.data] == [0, 1] and vectors[0] != vectors[1], f"strange vectors: {packed}")
    check(packed.usage.total_tokens == packed.usage.prompt_tokens, f"the total is wrong: {packed.usage}")
    return {"dimensions": [len(one) for one in vectors], "usage": packed.usage.prompt_tokens}


def models() -> dict:
    listed = [model.id for model in api.models.list()]
    one = api.models.retrieve(args.model)
    check(one.object == "model", f"a strange model: {one}")
    return {"models": listed, "retrieved": one.id}


def responses_plain() -> dict:
    answer = api.responses.create(model=args.model, instructions=SYSTEM, input=PROMPT, store=False)
    check(answer.object == "response" and answer.error is None, f"a strange answer: {answer}")
    return {"text": answer.output_text, "status": answer.status, "usage": usage_of(answer.usage)}


def responses_stream() -> dict:
    numbers, kinds = [], []
    with api.responses.stream(model=args.model, instructions=SYSTEM, input=PROMPT) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            if kinds[-1:] != [event.type]:
                kinds.append(event.type)
        answer = stream.get_final_response()
    check(numbers == list(range(len(numbers))), f"the numbers have gaps: {numbers}")
    return {"text": answer.output_text, "status": answer.status, "usage": usage_of(answer.usage), "events": kinds}


def responses_tools() -> dict:
    first = api.responses.create(model=args.model, input=QUESTION, tools=[RESPONSES_TOOL])
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    with api.responses.stream(
        model=args.model, input=[result], tools=[RESPONSES_TOOL], previous_response_id=first.id
    ) as stream:
        second = stream.get_final_response()
    return {
        "called": call.name,
        "arguments": json.loads(call.arguments),
        "text": second.output_text,
        "usage": [usage_of(first.usage), usage_of(second.usage)],
    }


def responses_stored() -> dict:
    first = api.responses.create(model=args.model, input="My name is Ada")
    second = api.responses.create(model=args.model, input="go on", previous_response_id=first.id)
    check(second.previous_response_id == first.id, f"a strange previous one: {second}")
    again = api.responses.retrieve(first.id)
    check(again.output_text == first.output_text, f"it is not the same: {again}")
    items = [item.content[0].text for item in api.responses.input_items.list(first.id)]
    api.responses.delete(first.id)
    gone = refused(openai.NotFoundError, lambda: api.responses.retrieve(first.id))
    lost = refused(
        openai.APIStatusError,
        lambda: api.responses.create(model=args.model, input="go on", previous_response_id=first.id),
    )
    api.responses.delete(second.id)
    return {
        "text": second.output_text,
        "usage": [usage_of(first.usage), usage_of(second.usage)],
        "items": items,
        "gone": gone.status_code,
        "lost": [lost.status_code, lost.code],
    }


def responses_stream_dies() -> dict:
    text, ended = "", None
    with api.responses.create(model=args.model, input=DYING, stream=True) as stream:
        for event in stream:
            check(ended is None, f"something came after the error: {event}")
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "error":
                # This SDK hands it on; the other one throws.
                ended = event
    check(ended is not None and ended.message, "it ended without an error")
    return {"text": text, "code": ended.code}


def error(e) -> dict:
    return {"error": type(e).__name__, "status": e.status_code, "code": e.code, "type": e.type}


def unknown_model() -> dict:
    def ask(model: str):
        return refused(
            openai.NotFoundError, lambda: api.chat.completions.create(model=model, messages=MESSAGES)
        )

    return error(ask("no-such-model"))


def bad_key() -> dict:
    wrong = args.key[:-4] + "AAAA"
    with client(wrong) as stranger:
        return error(
            refused(
                openai.AuthenticationError,
                lambda: stranger.chat.completions.create(model=args.model, messages=MESSAGES),
            )
        )


SCENARIOS = [
    chat_plain,
    chat_stream,
    chat_stream_usage,
    chat_tools,
    chat_tools_stream,
    chat_tools_parallel,
    chat_parsed,
    chat_length,
    chat_stop,
    chat_image,
    chat_stream_dies,
    embeddings,
    models,
    responses_plain,
    responses_stream,
    responses_tools,
    responses_stored,
    responses_stream_dies,
    unknown_model,
    bad_key,
]

if __name__ == "__main__":
    args = arguments()
    with client() as api:
        run("openai-py", openai.__version__, {one.__name__: one for one in SCENARIOS}, args.scenarios)
