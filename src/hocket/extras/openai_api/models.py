"""Name the model as clients do: by the last part of its folder's path, by its path, or as set."""

from typing import Any

from fastapi import Request

from hocket.server.errors import ApiError
from hocket.server.parts import Server


def served_names(server: Server) -> list[str]:
    """List the names by which clients may ask for the model; the first is the one that is shown."""
    return list(getattr(server.arguments, "served_model_name", ()))


def add_model_route(server: Server, names: list[str]) -> None:
    """Add GET /v1/models/NAME, which vLLM lacks; a name may have slashes."""

    @server.app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Describe the served model."""
        require_name(name, names)
        listed = await request.app.state.openai_serving_models.show_available_models()
        for card in listed.data:
            if card.id == name:
                described: dict[str, Any] = card.model_dump()
                return described
        raise unknown(name, names)


def require_name(name: str, names: list[str]) -> None:
    """Raise ApiError for a model that is not served."""
    if name not in names:
        raise unknown(name, names)


def unknown(name: str, names: list[str]) -> ApiError:
    """Make the error of a wrong name, with the right one."""
    message = f"there is no model {name[:200]!r} here: this server serves {names[0]!r}"
    return ApiError(404, "model_not_found", message, f"ask for {names[0]!r}, or for no model")
