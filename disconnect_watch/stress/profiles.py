"""Which protocol a server speaks: told by the user, or by the path of the URL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from disconnect_watch.stress.exchange import Exchange
from disconnect_watch.stress.generate import GenerateExchange
from disconnect_watch.stress.infer import InferExchange
from disconnect_watch.stress.lines import LineExchange
from disconnect_watch.stress.openai import OpenAIExchange
from disconnect_watch.stress.target import Target, TargetError
from disconnect_watch.stress.template import TemplateExchange

__all__ = ["Asking", "Profile", "exchange_with"]


class Profile(StrEnum):
    """The protocols."""

    #: KServe v2's infer, and Triton's generate and generate_stream.
    TRITON = "triton"
    #: Completions and chat completions.
    OPENAI = "openai"
    #: Any request, any answer.
    HTTP = "http"
    #: One line there, lines back.
    TCP = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What the clients ask for, each profile what it knows of.

    Args:
        prompt, max_tokens, leaver_max_tokens: of what generates.
        model: of triton and openai where the URL has no path, and of openai.
        is_stream: of openai, and of triton where the URL has no path.
        method, status: of http.
        headers: of all but tcp.
        body, leaver_body: of http and infer.
        send, num_lines: of tcp.
        expect: of http and tcp.
    """

    prompt: str = "The class"
    max_tokens: int = 32
    leaver_max_tokens: int = 100_000
    model: str | None = None
    is_stream: bool = True
    method: str = "GET"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    leaver_body: str | None = None
    send: str = "hello {index}"
    num_lines: int | None = 1
    expect: str | None = None


def exchange_with(
    target: Target, asking: Asking, profile: Profile | None = None
) -> tuple[Target, Exchange]:
    """What is asked of the target, and the target with the path where it had none.

    Args:
        target: of the server.
        asking: what for.
        profile: its protocol; without it as its path says.

    Raises:
        TargetError: the target is not one of this protocol, or something is not given.
    """
    profile = profile or _profile_of(target)
    if (profile is Profile.TCP) != (target.path is None):
        raise TargetError(
            f"cannot speak {profile} to {target}: give host:port for tcp, a URL for all else"
        )
    match profile:
        case Profile.TCP:
            return target, LineExchange(
                send=asking.send, num_lines=asking.num_lines, expect=asking.expect
            )
        case Profile.HTTP:
            target = target.with_path(target.path or "/")
            return target, _http(target, asking)
        case Profile.OPENAI:
            target = target.with_path(target.path or "/v1/completions")
            return target, _openai(target, asking)
        case Profile.TRITON:
            return _triton(target, asking)


def _profile_of(target: Target) -> Profile:
    if target.path is None:
        return Profile.TCP
    path = target.path.partition("?")[0]
    if path.endswith(("/generate", "/generate_stream", "/infer")):
        return Profile.TRITON
    if path.endswith("/completions"):
        return Profile.OPENAI
    raise TargetError(
        f"cannot tell what to ask of {target}: give the URL of a generate, generate_stream, infer "
        f"or completions, such as {target.with_path('/v2/models/NAME/generate_stream')}, or a "
        "profile"
    )


def _http(target: Target, asking: Asking) -> Exchange:
    return TemplateExchange(
        target,
        method=asking.method,
        headers=asking.headers,
        body=asking.body or "",
        leaver_body=asking.leaver_body,
        status=asking.status,
        expect=asking.expect,
    )


def _openai(target: Target, asking: Asking) -> Exchange:
    if asking.model is None:
        raise TargetError(f"cannot ask {target} without the name of a model: give the model")
    return OpenAIExchange(
        target,
        asking.model,
        prompt=asking.prompt,
        max_tokens=asking.max_tokens,
        leaver_max_tokens=asking.leaver_max_tokens,
        is_stream=asking.is_stream,
        headers=asking.headers,
    )


def _triton(target: Target, asking: Asking) -> tuple[Target, Exchange]:
    if not target.path:
        if asking.model is None:
            raise TargetError(
                f"cannot ask {target} without the name of a model: give it, or the whole URL"
            )
        verb = "generate_stream" if asking.is_stream else "generate"
        target = target.with_path(f"/v2/models/{asking.model}/{verb}")
    if (target.path or "").partition("?")[0].endswith("/infer"):
        if asking.body is None:
            raise TargetError(f"cannot ask {target} without inputs: give the body of a request")
        return target, InferExchange(target, asking.body, asking.leaver_body, asking.headers)
    return target, GenerateExchange(
        target,
        prompt=asking.prompt,
        max_tokens=asking.max_tokens,
        leaver_max_tokens=asking.leaver_max_tokens,
        headers=asking.headers,
    )
