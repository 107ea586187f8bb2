"""A stand-in of the hub's HTTP API, as far as huggingface_hub's upload of a model speaks it (LFS, not Xet)."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """What the hub was told and holds. token: the one it knows; files: {name: bytes} of the committed repository."""

    def __init__(self, token: str) -> None:
        self.token, self.asked, self.objects, self.files, self.made = token, [], {}, {}, None

    def answer(self, method: str, path: str, body: bytes, authorised: bool, base: str):
        """(status, JSON) of one request."""
        self.asked.append(f"{method} {path}")
        if path.startswith("/objects/"):  # where large files go: signed addresses, no token
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if not authorised:
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user", "auth": {}}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            self.made = json.loads(body)
            return 200, {"url": f"{base}/me/spikes", "id": "me/spikes"}
        if path == "/api/models/me/spikes/preupload/main":
            kinds = {True: "lfs", False: "regular"}
            files = [file["path"] for file in json.loads(body)["files"]]
            told = [{"path": p, "uploadMode": kinds[p.endswith(".safetensors")], "shouldIgnore": False} for p in files]
            return 200, {"files": told, "commitOid": "0" * 40}
        if path == "/me/spikes.git/info/lfs/objects/batch":
            wanted = json.loads(body)["objects"]
            actions = {item["oid"]: {"upload": {"href": f"{base}/objects/{item['oid']}"}} for item in wanted}
            return 200, {"transfer": "basic", "objects": [{**w, "actions": actions[w["oid"]]} for w in wanted]}
        if path == "/api/models/me/spikes/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.objects[value["oid"]]
            return 200, {"commitUrl": f"{base}/me/spikes/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}
        return 404, {"error": f"nothing at {path}"}


@contextmanager
def hub_stand_in(token: str):
    """Yields (address, hub)."""
    hub = Hub(token)

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            base = f"http://{self.headers['Host']}"
            right = self.headers.get("Authorization") == f"Bearer {hub.token}"
            status, content = hub.answer(self.command, self.path.partition("?")[0], body, right, base)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hub
    finally:
        server.shutdown()
        server.server_close()
