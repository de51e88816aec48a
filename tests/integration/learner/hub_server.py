"""A Hugging Face Hub with one model, on loopback: as much of it as its library asks for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

REPO = "some-org/Small.Model-1"
SHA = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves the files of a folder as `REPO` at `SHA`; with a `token` to nobody else. Counts who asked for what."""

    def __init__(self, folder: Path, token: str = "") -> None:
        self.folder = folder
        self.token = token
        self.sizes: dict[str, int] = {}
        """File → the size that is told of it, where it is another one."""
        self.main = SHA
        """The commit that is newest now; what it has is not here."""
        self.anonymous: list[str] = []
        """Requests without a token: method and path."""
        api = f"/api/models/{REPO}"
        self.app = Starlette(
            routes=[
                Route(f"{api}/revision/{{name}}", self._info),
                Route(f"{api}/tree/{SHA}", self._tree),
                Route(f"/{REPO}/resolve/{SHA}/{{name}}", self._file, methods=["GET", "HEAD"]),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if "authorization" not in request.headers:
            self.anonymous.append(f"{request.method} {request.url.path}")
        if not self.token or request.headers.get("authorization") == f"Bearer {self.token}":
            return None
        return Response(status_code=401, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})

    async def _info(self, request: Request) -> Response:
        names = [{"rfilename": path.name} for path in self.folder.iterdir()]
        sha = self.main if request.path_params["name"] == "main" else SHA
        return self._refusal(request) or JSONResponse({"id": REPO, "sha": sha, "siblings": names})

    async def _tree(self, request: Request) -> Response:
        entries = [
            {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": self._oid(p)}
            for p in self.folder.iterdir()
        ]
        return self._refusal(request) or JSONResponse(entries)

    async def _file(self, request: Request) -> Response:
        path = self.folder / request.path_params["name"]
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{self._oid(path)}"'}
        if path.name in self.sizes:
            headers["X-Linked-Size"] = str(self.sizes[path.name])
        return self._refusal(request) or FileResponse(path, headers=headers)

    def _oid(self, path: Path) -> str:
        return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
