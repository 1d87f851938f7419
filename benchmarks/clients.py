"""Ask a server with the unmodified clients that other programs use: each for what it is made for.

Starts a server of the folder MODEL with the tool parser hermes, or asks the one at --url. Prints a line for each
question: the client, its version, what it asked, and what it got, or why it failed. The status is 1 where one failed. A
client that is not installed says so, and does not count as failed. The model must know chats; how good its answers are
does not matter: tools are forced.

    python3 -m venv CLIENTS
    CLIENTS/bin/pip install psutil openai anthropic openai-agents langchain-openai langchain-anthropic litellm \\
        "pydantic-ai-slim[openai,anthropic]" "lm-eval[api]" transformers inspect-ai "verifiers<0.4"
    CLIENTS/bin/python benchmarks/clients.py MODEL

The clients run in the Python that runs this script, each in a process of its own; run.py finds the server's own.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shared import beside, parser, serving

if __name__ == "__main__":
    PARSER = parser(
        __doc__,
        url=("", "of a server of this model that runs already, with a tool parser and no token"),
        only=("", "the clients to ask with, with commas between; default: all"),
        length=(2048, "tokens that the server's model has room for"),
        timeout=(300.0, "seconds for the next answer of a client"),
    )
    PARSER.add_argument("model", metavar="MODEL", help="the folder of the model")
    OPTIONS = PARSER.parse_args()

QUESTION = "What is the weather in Cologne?"
CHAT = [{"role": "user", "content": QUESTION}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Cologne", "Paris"]}},  # any model comes to their ends
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = {"name": "weather", "description": "Tell the weather of a city."}
FUNCTION = ABOUT | {"parameters": PARAMETERS, "strict": True}  # without `strict` vLLM allows any JSON
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
MESSAGES_TOOL = ABOUT | {"input_schema": PARAMETERS, "strict": True}
MAX_TOKENS = 24
TOOL_TOKENS = 256
FORCED_CHAT: dict[str, Any] = {
    "tools": [CHAT_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
}


class Server(NamedTuple):
    """The server that is asked."""

    url: str
    folder: str  # of the model; its last part is the name of the model
    scratch: str  # a folder for files

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def model(self) -> str:
        return Path(self.folder).name


Ask = Callable[[Server], str]
QUESTIONS: dict[str, dict[str, Ask]] = {}
"""By the package of a client: what it asks, and the function that asks it and describes what it got."""


def asks(package: str, text: str) -> Callable[[Ask], Ask]:
    """Register a function that asks something with a package."""

    def register(ask: Ask) -> Ask:
        QUESTIONS.setdefault(package, {})[text] = ask
        return ask

    return register


def described(text: str, tokens: int | None, answer: Any = None) -> str:
    """Describe an answer of text, and its versions where the client shows them. Raises ValueError for none."""
    if tokens == 0 or (tokens is None and not text):
        raise ValueError("the answer has no token")
    parts = ["text" if tokens is None else f"{tokens} tokens"]
    versions = getattr(answer, "weight_versions", None)
    if versions is not None:
        parts.append(f"weight versions {versions}")
    return ", ".join(parts)


def called(name: str, arguments: str | dict[str, Any]) -> str:
    """Describe a call of the tool. Raises ValueError for another one."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name != "weather" or list(read) != ["city"]:
        raise ValueError(f"the model called {name}({arguments}) in place of weather(city)")
    return f"a call of {name}({json.dumps(read, ensure_ascii=False)})"


def openai_client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


@asks("openai", "models")
def openai_models(server: Server) -> str:
    client = openai_client(server)
    names = [card.id for card in client.models.list()]
    if client.models.retrieve(server.model).id != server.model:
        raise ValueError(f"the server does not know {server.model}")
    return " and ".join(names)


@asks("openai", "chat.completions")
def openai_chat(server: Server) -> str:
    answer = openai_client(server).chat.completions.create(
        model=server.model, messages=CHAT, max_completion_tokens=MAX_TOKENS
    )
    return described(answer.choices[0].message.content, answer.usage.completion_tokens, answer)


@asks("openai", "chat.completions, a stream")
def openai_chat_stream(server: Server) -> str:
    stream = openai_client(server).chat.completions.create(
        model=server.model,
        messages=CHAT,
        max_completion_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return described(text, chunks[-1].usage.completion_tokens, chunks[-1])


@asks("openai", "chat.completions, a forced tool")
def openai_chat_tool(server: Server) -> str:
    answer = openai_client(server).chat.completions.create(
        model=server.model, messages=CHAT, max_completion_tokens=TOOL_TOKENS, **FORCED_CHAT
    )
    function = answer.choices[0].message.tool_calls[0].function
    return called(function.name, function.arguments)


@asks("openai", "chat.completions, a forced tool in a stream")
def openai_chat_tool_stream(server: Server) -> str:
    client = openai_client(server)
    request = {"model": server.model, "messages": CHAT, "max_completion_tokens": TOOL_TOKENS}
    with client.chat.completions.stream(**request, **FORCED_CHAT) as stream:
        answer = stream.get_final_completion()
    function = answer.choices[0].message.tool_calls[0].function
    return called(function.name, function.arguments)


@asks("openai", "completions")
def openai_completions(server: Server) -> str:
    answer = openai_client(server).completions.create(
        model=server.model, prompt=["Cologne is", "Paris is"], n=2, logprobs=1, max_tokens=MAX_TOKENS
    )
    if len(answer.choices) != 4:
        raise ValueError(f"{len(answer.choices)} completions came in place of 4")
    return described(answer.choices[0].text, answer.usage.completion_tokens, answer)


@asks("openai", "completions, a stream")
def openai_completions_stream(server: Server) -> str:
    stream = openai_client(server).completions.create(
        model=server.model, prompt="Cologne is", max_tokens=MAX_TOKENS, stream=True
    )
    chunks = list(stream)
    return described("".join(chunk.choices[0].text for chunk in chunks), None, chunks[-1])


@asks("openai", "responses")
def openai_responses(server: Server) -> str:
    client = openai_client(server)
    first = client.responses.create(model=server.model, input=QUESTION, max_output_tokens=MAX_TOKENS)
    answer = client.responses.create(
        model=server.model, input="And tomorrow?", previous_response_id=first.id, max_output_tokens=MAX_TOKENS
    )
    return described(answer.output_text, answer.usage.output_tokens, answer)


@asks("openai", "responses, a stream")
def openai_responses_stream(server: Server) -> str:
    client = openai_client(server)
    with client.responses.stream(model=server.model, input=QUESTION, max_output_tokens=MAX_TOKENS) as stream:
        answer = stream.get_final_response()
    return described(answer.output_text, answer.usage.output_tokens, answer)


@asks("openai", "responses, a forced tool")
def openai_responses_tool(server: Server) -> str:
    answer = openai_client(server).responses.create(
        model=server.model,
        input=QUESTION,
        max_output_tokens=TOOL_TOKENS,
        tools=[RESPONSES_TOOL],
        tool_choice={"type": "function", "name": "weather"},
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    return called(call.name, call.arguments)


def messages_client(server: Server) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@asks("anthropic", "messages")
def messages(server: Server) -> str:
    answer = messages_client(server).messages.create(model=server.model, messages=CHAT, max_tokens=MAX_TOKENS)
    return described(answer.content[0].text, answer.usage.output_tokens, answer)


@asks("anthropic", "messages, a stream")
def messages_stream(server: Server) -> str:
    client = messages_client(server)
    with client.messages.stream(model=server.model, messages=CHAT, max_tokens=MAX_TOKENS) as stream:
        *_, last = stream
        answer = stream.get_final_message()
    return described(answer.content[0].text, answer.usage.output_tokens, last)


@asks("anthropic", "messages.count_tokens")
def messages_count(server: Server) -> str:
    client = messages_client(server)
    count = client.messages.count_tokens(model=server.model, messages=CHAT).input_tokens
    answer = client.messages.create(model=server.model, messages=CHAT, max_tokens=1)
    if count != answer.usage.input_tokens:
        raise ValueError(f"it counts {count} tokens, and reads {answer.usage.input_tokens}")
    return f"{count} tokens, as many as it reads"


@asks("anthropic", "messages, a forced tool and its result")
def messages_tool(server: Server) -> str:
    client = messages_client(server)
    request: Any = {"model": server.model, "max_tokens": TOOL_TOKENS, "tools": [MESSAGES_TOOL]}
    answer = client.messages.create(messages=CHAT, tool_choice={"type": "tool", "name": "weather"}, **request)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    chat = [*CHAT, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=chat, **request)
    return f"{called(call.name, call.input)}, then {answer.usage.output_tokens} tokens"


@asks("openai-agents", "an agent with its default model and a tool")
def openai_agents(server: Server) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0))
    cities = []

    @agents.function_tool  # type: ignore[untyped-decorator, unused-ignore]  # it may not be installed
    def weather(city: Literal["Cologne", "Paris"]) -> str:
        """Tell the weather of a city."""
        cities.append(city)
        return "rain"

    settings = agents.ModelSettings(tool_choice="weather")
    agent = agents.Agent(name="forecaster", model=server.model, tools=[weather], model_settings=settings)
    result = agents.Runner.run_sync(agent, QUESTION)
    tokens = result.context_wrapper.usage.output_tokens
    return f"{called('weather', {'city': cities[0]})}, {described(result.final_output, tokens)} in both answers"


def langchain_text(model: Any) -> str:
    answer = model.invoke(QUESTION)
    streamed = "".join(chunk.text for chunk in model.stream(QUESTION))
    return f"{described(answer.text, answer.usage_metadata['output_tokens'])} and {described(streamed, None)}"


def langchain_call(model: Any, tool: dict[str, Any]) -> str:
    (call,) = model.bind_tools([tool], tool_choice="weather").invoke(QUESTION).tool_calls
    return called(call["name"], call["args"])


def langchain_openai(server: Server, max_tokens: int, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=server.model, base_url=server.v1, api_key="none", max_tokens=max_tokens, **more)


def langchain_anthropic(server: Server, max_tokens: int) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=server.model, base_url=server.url, api_key="none", max_tokens=max_tokens)


@asks("langchain-openai", "ChatOpenAI, whole and a stream")
def langchain_chat(server: Server) -> str:
    return langchain_text(langchain_openai(server, MAX_TOKENS))


@asks("langchain-openai", "ChatOpenAI, a forced tool")
def langchain_tool(server: Server) -> str:
    return langchain_call(langchain_openai(server, TOOL_TOKENS), CHAT_TOOL)


@asks("langchain-openai", "ChatOpenAI with responses, a forced tool")
def langchain_responses(server: Server) -> str:
    return langchain_call(langchain_openai(server, TOOL_TOKENS, use_responses_api=True), CHAT_TOOL)


@asks("langchain-anthropic", "ChatAnthropic, whole and a stream")
def langchain_messages(server: Server) -> str:
    return langchain_text(langchain_anthropic(server, MAX_TOKENS))


@asks("langchain-anthropic", "ChatAnthropic, a forced tool")
def langchain_messages_tool(server: Server) -> str:
    return langchain_call(langchain_anthropic(server, TOOL_TOKENS), MESSAGES_TOOL)


def litellm_answer(model: str, url: str, **more: Any) -> Any:
    import litellm

    return litellm.completion(model=model, api_base=url, api_key="none", messages=CHAT, num_retries=0, **more)


@asks("litellm", "its provider openai")
def litellm_openai(server: Server) -> str:
    answer = litellm_answer(f"openai/{server.model}", server.v1, max_tokens=MAX_TOKENS)
    return described(answer.choices[0].message.content, answer.usage.completion_tokens, answer)


@asks("litellm", "its provider openai, a forced tool")
def litellm_tool(server: Server) -> str:
    answer = litellm_answer(f"openai/{server.model}", server.v1, max_tokens=TOOL_TOKENS, **FORCED_CHAT)
    function = answer.choices[0].message.tool_calls[0].function
    return called(function.name, function.arguments)


@asks("litellm", "its provider anthropic, whole and a stream")
def litellm_anthropic(server: Server) -> str:
    name = f"anthropic/{server.model}"
    answer = litellm_answer(name, server.url, max_tokens=MAX_TOKENS)
    stream = litellm_answer(name, server.url, max_tokens=MAX_TOKENS, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = described(answer.choices[0].message.content, answer.usage.completion_tokens, answer)
    return f"{whole} and {described(streamed, None)}"


def pydantic_answer(model: Any) -> str:
    import pydantic_ai

    agent = pydantic_ai.Agent(model, model_settings={"max_tokens": MAX_TOKENS}, retries=0)
    result = agent.run_sync(QUESTION)
    return described(result.output, result.usage.output_tokens)


@asks("pydantic-ai-slim", "an agent with OpenAIChatModel")
def pydantic_chat(server: Server) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_answer(OpenAIChatModel(server.model, provider=OpenAIProvider(server.v1, "none")))


@asks("pydantic-ai-slim", "an agent with OpenAIResponsesModel")
def pydantic_responses(server: Server) -> str:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_answer(OpenAIResponsesModel(server.model, provider=OpenAIProvider(server.v1, "none")))


@asks("pydantic-ai-slim", "an agent with AnthropicModel")
def pydantic_messages(server: Server) -> str:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=server.url, api_key="none")
    return pydantic_answer(AnthropicModel(server.model, provider=provider))


def evaluated(server: Server, kind: str, route: str, output: str) -> dict[str, Any]:
    """Evaluate the model with lm-eval, on a task of two rows in a file. Returns the task's results."""
    import lm_eval

    rows = Path(server.scratch, "rows.jsonl")
    rows.write_text('{"question": "1 + 1 =", "answer": "2"}\n{"question": "2 + 2 =", "answer": "4"}\n')
    task: dict[str, Any] = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": output,
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
    }
    if output == "generate_until":
        task["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": MAX_TOKENS}
        task["metric_list"] = [{"metric": "exact_match"}]
    else:
        task["metric_list"] = [{"metric": "perplexity"}, {"metric": "acc"}]
    # The name of the model is the path of its folder, too, where lm-eval looks for the tokenizer.
    arguments = {"model": server.folder, "base_url": f"{server.v1}/{route}", "max_retries": 1}
    chats = kind == "local-chat-completions"
    results = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=[task], apply_chat_template=chats, bootstrap_iters=0
    )
    values: dict[str, Any] = results["results"]["sums"]
    return values


@asks("lm-eval", "local-completions, likelihoods of a task in a file")
def lm_eval_likelihoods(server: Server) -> str:
    values = evaluated(server, "local-completions", "completions", "loglikelihood")
    return f"perplexity {values['perplexity,none']:.3g}, acc {values['acc,none']:g}"


@asks("lm-eval", "local-completions, answers of a task in a file")
def lm_eval_completions(server: Server) -> str:
    values = evaluated(server, "local-completions", "completions", "generate_until")
    return f"exact_match {values['exact_match,none']:g}"


@asks("lm-eval", "local-chat-completions, answers of a task in a file")
def lm_eval_chats(server: Server) -> str:
    values = evaluated(server, "local-chat-completions", "chat/completions", "generate_until")
    return f"exact_match {values['exact_match,none']:g}"


def inspected(server: Server, model: str, **more: Any) -> str:
    """Evaluate the model with inspect-ai, on a task of one sample."""
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    task = inspect_ai.Task(dataset=[Sample(QUESTION, target="rain")], solver=generate(), scorer=includes())
    (log,) = inspect_ai.eval(
        task, model=model, display="none", log_dir=server.scratch, max_tokens=MAX_TOKENS, max_retries=0, **more
    )
    if log.status != "success":
        raise ValueError(log.error.message)
    (usage,) = log.stats.model_usage.values()
    return described(log.samples[0].output.completion, usage.output_tokens)


@asks("inspect-ai", "its provider openai")
def inspect_openai(server: Server) -> str:
    os.environ["OPENAI_API_KEY"] = "none"
    return inspected(server, f"openai/{server.model}", model_base_url=server.v1)


@asks("inspect-ai", "its provider openai-api")
def inspect_openai_api(server: Server) -> str:
    os.environ.update(LOCAL_API_KEY="none", LOCAL_BASE_URL=server.v1)
    return inspected(server, f"openai-api/local/{server.model}")


@asks("inspect-ai", "its provider anthropic")
def inspect_anthropic(server: Server) -> str:
    os.environ["ANTHROPIC_API_KEY"] = "none"
    return inspected(server, f"anthropic/{server.model}", model_base_url=server.url)


@asks("verifiers", "a SingleTurnEnv")
def verifiers_environment(server: Server) -> str:
    import openai
    import verifiers
    from datasets import Dataset
    from verifiers.clients import OpenAIChatCompletionsClient

    def length(completion: Any) -> float:
        return float(len(completion[-1]["content"]))

    rows = Dataset.from_dict({"question": [QUESTION], "answer": ["rain"]})
    environment = verifiers.SingleTurnEnv(dataset=rows, rubric=verifiers.Rubric(funcs=[length]))

    async def play() -> Any:
        client = openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0)
        return await environment.evaluate(
            OpenAIChatCompletionsClient(client), server.model, sampling_args={"max_tokens": MAX_TOKENS}, num_examples=1
        )

    (output,) = asyncio.run(play())["outputs"]
    if output["error"]:
        raise ValueError(output["error"])
    return f"{described(output['completion'][-1]['content'], None)}, reward {output['reward']:g}"


def answer_questions(pipe: Connection, package: str, server: Server) -> None:
    """Ask all that a package asks; send whether each went well, and its line."""
    with open(Path(server.scratch, f"{package}.log"), "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)  # the libraries' own lines
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=server.scratch, LITELLM_LOCAL_MODEL_COST_MAP="True")
    for text, ask in QUESTIONS[package].items():
        try:
            pipe.send((True, f"{text}: {ask(server)}"))
        except Exception as error:  # noqa: BLE001 - of whatever client
            reason = " ".join(str(error).split())[:400]
            pipe.send((False, f"{text}: failed: {type(error).__name__}: {reason}"))


def ask_with(packages: Iterable[str], server: Server, timeout: float) -> int:
    """Ask with each package; return how many questions failed."""
    num_failed = 0
    for package in packages:
        try:
            head = f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            print(f"{package}: not installed", flush=True)
            continue
        with beside(answer_questions, package, server) as pipe:
            for text in QUESTIONS[package]:
                problem = ""
                try:
                    if not pipe.poll(timeout):
                        problem = f"no answer in {timeout:g} s"
                    else:
                        is_well, line = pipe.recv()
                except EOFError:
                    problem = "the client's process ended"
                if problem:
                    is_well, line = False, f"{text}: failed: {problem}"
                print(f"{head}: {line}", flush=True)
                num_failed += not is_well
                if problem:  # it asks nothing more
                    break
    return num_failed


def main() -> int:
    packages = OPTIONS.only.split(",") if OPTIONS.only else list(QUESTIONS)
    unknown = [package for package in packages if package not in QUESTIONS]
    if unknown:
        PARSER.error(f"--only: there is no client {', '.join(unknown)}: {', '.join(QUESTIONS)}")
    folder = str(Path(OPTIONS.model).resolve())
    with tempfile.TemporaryDirectory() as scratch:
        if OPTIONS.url:
            return int(ask_with(packages, Server(OPTIONS.url, OPTIONS.model, scratch), OPTIONS.timeout) > 0)
        from support.processes import free_port

        port = free_port()
        settings = [f"model.path={folder}", f"run.dir={scratch}/run", f"server.port={port}"]
        settings += ["server.engine={tool_call_parser: hermes}", f"model.max_length={OPTIONS.length}"]
        with serving(settings, Path(scratch, "server.log")):
            return int(ask_with(packages, Server(f"http://127.0.0.1:{port}", folder, scratch), OPTIONS.timeout) > 0)


if __name__ == "__main__":
    sys.exit(main())
