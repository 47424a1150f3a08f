"""An example of a release hook: it tells Kubernetes that a pod needs less, so that others get what it gives back.

DynMo, section 3.4.2: a PATCH of ``resources.requests`` and ``resources.limits`` in the pod's spec. What a cluster then
does is its own affair:

- From Kubernetes 1.33 on (KEP-1287) a running pod's CPU and memory are changed in place, by the pod's subresource
  ``resize``. It takes nothing else.
- Older clusters with that feature take the same patch of the pod itself.
- Extended resources such as ``nvidia.com/gpu`` are immutable in a running pod: the API server refuses the patch (422),
  unless an operator of the cluster allows for it. There a rank is best released by the end of its process, in a pod of
  its own that is not restarted.

Needs the official client: ``pip install 'kubernetes>=32'``, the first with the subresource ``resize`` of pods.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args

from zeroresize.utils.value_checks import number

Subresource = Literal["resize", "none", "either"]

_NOT_FOUND = (404, 405)
_MAX_CHARS = 500


class ReleasedRank(Protocol):
    """What a hook is told; see :class:`zeroresize.pipeline.Release`."""

    @property
    def rank(self) -> int: ...


class KubernetesHook:
    """Changes the resources of the pod that a released rank is in; a hook for ``on_release``.

    ::

        KubernetesHook("training", "trainer-{rank}", "worker", {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}})

    Every rank that is released patches once. Ranks that share a pod set the same values.

    Args:
        namespace: of the pod.
        pod: its name, in which ``{rank}`` is filled in, counted over the whole job; None for that of this process's
            own pod, its ``HOSTNAME``.
        container: whose resources change.
        resources: what it needs from now on: "requests" and "limits", each by resource, such as {"cpu": "500m"}.
        subresource: "resize" or "none" for a patch of the pod itself; "either" for the first one, and the second where
            the cluster has no such subresource.
        timeout_s: of each request.
        api_client: a ``kubernetes.client.ApiClient``; None for one by the pod's service account or, outside of a
            cluster, by the user's kubeconfig, found when a rank is released.

    Raises:
        ImportError: if the client is not installed.
        ValueError: for values that are not allowed.
    """

    def __init__(
        self,
        namespace: str,
        pod: str | None,
        container: str,
        resources: Mapping[str, Mapping[str, str]],
        *,
        subresource: Subresource = "either",
        timeout_s: float = 10.0,
        api_client: Any = None,
    ) -> None:
        _client()
        for name, value in (("namespace", namespace), ("container", container), ("pod", pod)):
            if not (value is None and name == "pod") and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={value!r} is not allowed: it is a name")
        is_mapping = isinstance(resources, Mapping) and all(isinstance(one, Mapping) for one in resources.values())
        if not is_mapping or not resources or not set(resources) <= {"requests", "limits"}:
            raise ValueError(
                f"resources={resources!r} is not allowed: wanted are 'requests', 'limits' or both, each by resource"
            )
        if subresource not in get_args(Subresource):
            raise ValueError(f"subresource={subresource!r} is not allowed: there are {list(get_args(Subresource))}")
        number("timeout_s", timeout_s, above=0.0)
        self._namespace, self._pod, self._container = namespace, pod, container
        self._resources = {kind: {key: str(one) for key, one in wanted.items()} for kind, wanted in resources.items()}
        self._subresource, self._timeout_s, self._api_client = subresource, timeout_s, api_client
        self._name_of(0)

    def __call__(self, release: ReleasedRank) -> None:
        """Patch the pod.

        Raises:
            RuntimeError: if the API server cannot be reached, does not answer in time or refuses; with its message.
        """
        client = _client()
        pod = self._name_of(release.rank)
        api = client.CoreV1Api(self._api_client or _default_api_client(client))
        body = {"spec": {"containers": [{"name": self._container, "resources": self._resources}]}}
        patches = {"resize": api.patch_namespaced_pod_resize, "none": api.patch_namespaced_pod}
        tried = ["resize", "none"] if self._subresource == "either" else [self._subresource]
        for turn, subresource in enumerate(tried, 1):
            try:
                # The answer is not read into a pod: nothing of it is needed, and its parsing could fail.
                patches[subresource](
                    pod, self._namespace, body, _request_timeout=self._timeout_s, _preload_content=False
                )
                return
            except client.ApiException as error:
                if error.status in _NOT_FOUND and turn < len(tried):
                    continue
                raise RuntimeError(
                    f"the API server refuses to change pod {pod} of namespace {self._namespace}: {error.status} "
                    f"{error.reason}: {_message_of(error.body)}"
                ) from error
            except Exception as error:  # of urllib3, whatever is wrong with the way there
                raise RuntimeError(
                    f"pod {pod} of namespace {self._namespace} cannot be changed, as the API server at "
                    f"{api.api_client.configuration.host} does not answer: {error}"
                ) from error

    def _name_of(self, rank: int) -> str:
        if self._pod is None:
            name = os.environ.get("HOSTNAME", "")
            if not name:
                raise ValueError("pod=None is the pod of this process, but HOSTNAME, which is its name, is not set")
            return name
        try:
            return self._pod.format(rank=rank)
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"pod={self._pod!r} is not allowed: only {{rank}} can be filled in ({error!r})") from error


def _message_of(body: Any) -> str:
    """The message in a ``Status`` object of the API server, or whatever has come instead."""
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, LookupError):
        return str(body)[:_MAX_CHARS]


def _client() -> Any:
    try:
        import kubernetes.client
    except ImportError as error:
        raise ImportError(
            "KubernetesHook needs the official client of Kubernetes: pip install 'kubernetes>=32'"
        ) from error
    return kubernetes.client


def _default_api_client(client: Any) -> Any:
    import kubernetes.config

    configuration = client.Configuration()
    try:
        kubernetes.config.load_incluster_config(client_configuration=configuration)
    except kubernetes.config.ConfigException:
        try:
            kubernetes.config.load_kube_config(client_configuration=configuration)
        except Exception as error:
            raise RuntimeError(
                f"there is neither a service account of a pod nor a kubeconfig to reach Kubernetes by: {error}"
            ) from error
    configuration.retries = False
    return client.ApiClient(configuration)
