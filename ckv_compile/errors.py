"""The errors of this package. Each message names the value, what is allowed, and what to do."""


class CKVError(Exception):
    """Base of every error raised on purpose by ckv_compile."""


class ConfigError(CKVError, ValueError):
    """A configuration, or a combination of configuration and model, that cannot work."""


class UnsupportedModelError(CKVError, ValueError):
    """A model that cannot be captured or rewritten as it is."""


class PassError(UnsupportedModelError):
    """A graph pass met a graph that it must not rewrite.

    Args:
        node: name of the graph node at fault.
        module: path of the module that the node was traced from.
        expected: what the pass needs there.
        found: what stands there, and what to do about it.
    """

    def __init__(self, node: str, module: str, expected: str, found: str) -> None:
        super().__init__(node, module, expected, found)
        self.node = node
        self.module = module
        self.expected = expected
        self.found = found
        self.failed_pass = ""
        self.passes_run: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"pass {self.failed_pass or '?'} stopped at node {self.node} of module {self.module}: "
            f"expected {self.expected}, found {self.found} "
            f"(passes already run: {', '.join(self.passes_run) or 'none'})"
        )


class CompileError(CKVError, RuntimeError):
    """The decode step could not be compiled here."""


class InputError(CKVError, ValueError):
    """Arguments of a call to the compiled model that it cannot serve."""


class ConcurrentUseError(CKVError, RuntimeError):
    """A second thread entered a model that is already running."""


class ArtifactError(CKVError, ValueError):
    """A saved model that is damaged, not made for this place, or cannot be written."""


class PeerError(CKVError, RuntimeError):
    """A process that was asked could not answer."""
