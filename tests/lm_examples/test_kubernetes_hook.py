"""What Kubernetes' API server is sent, by the official client, when a rank is released; a stub of it answers."""

import json
import logging
import sys
import time

import pytest
import torch
from helpers import pipelines
from werkzeug import Response

from lm_examples.kubernetes_hook import KubernetesHook
from zeroresize.pipeline import Release, repack
from zeroresize.pipeline.release_hooks import tell_outside

kubernetes = pytest.importorskip("kubernetes")

RELEASE = Release(rank=3, released=(2, 3), remaining=(0, 1), moved_bytes=10, step=40)
RESOURCES = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
BODY = {"spec": {"containers": [{"name": "worker", "resources": RESOURCES}]}}
POD = "/api/v1/namespaces/training/pods/trainer-3"
STATUS = {"kind": "Status", "status": "Failure", "message": "Pod updates may not change fields", "code": 422}


def hook_of(httpserver, **options):
    configuration = kubernetes.client.Configuration(host=httpserver.url_for("").rstrip("/"))
    configuration.retries = False
    client = kubernetes.client.ApiClient(configuration)
    return KubernetesHook("training", "trainer-{rank}", "worker", RESOURCES, api_client=client, **options)


def requests_of(httpserver):
    """Method, path, type and body of all."""
    return [
        (request.method, request.path, request.headers["Content-Type"], json.loads(request.get_data()))
        for request, _ in httpserver.log
    ]


def patch_of(path):
    return "PATCH", path, "application/strategic-merge-patch+json", BODY


@pytest.mark.parametrize(("subresource", "path"), [("resize", f"{POD}/resize"), ("none", POD)])
def test_the_pods_resources_are_patched(httpserver, subresource, path):
    httpserver.expect_request(path, method="PATCH").respond_with_json({"kind": "Pod"})
    hook_of(httpserver, subresource=subresource)(RELEASE)
    assert requests_of(httpserver) == [patch_of(path)]


@pytest.mark.parametrize("status", [404, 405])
def test_a_cluster_without_the_subresource_gets_a_patch_of_the_pod(httpserver, status):
    httpserver.expect_request(f"{POD}/resize").respond_with_data("", status=status)
    httpserver.expect_request(POD, method="PATCH").respond_with_json({"kind": "Pod"})
    hook_of(httpserver)(RELEASE)
    assert requests_of(httpserver) == [patch_of(f"{POD}/resize"), patch_of(POD)]


def test_a_cluster_with_the_subresource_gets_no_other_patch(httpserver):
    httpserver.expect_request(f"{POD}/resize", method="PATCH").respond_with_json({"kind": "Pod"})
    hook_of(httpserver)(RELEASE)
    assert requests_of(httpserver) == [patch_of(f"{POD}/resize")]


@pytest.mark.parametrize("status", [403, 422, 500])
def test_what_the_server_refuses_is_told_in_its_own_words(httpserver, status):
    httpserver.expect_request(f"{POD}/resize").respond_with_json(STATUS, status=status)
    with pytest.raises(
        RuntimeError, match=rf"refuses to change pod trainer-3 of namespace training: {status} .*: Pod updates may not"
    ):
        hook_of(httpserver)(RELEASE)
    assert len(httpserver.log) == 1


def test_a_pod_that_is_not_there_is_told(httpserver):
    with pytest.raises(RuntimeError, match="refuses to change pod trainer-3"):
        hook_of(httpserver, subresource="none")(RELEASE)


def test_a_server_that_does_not_answer_is_not_waited_for(httpserver):
    def answers_late(request):
        time.sleep(5.0)
        return Response("{}")

    httpserver.expect_request(f"{POD}/resize").respond_with_handler(answers_late)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"trainer-3 .* cannot be changed, as the API server at http://.* answer"):
        hook_of(httpserver, timeout_s=0.2)(RELEASE)
    assert time.monotonic() - begin < 4.5


def test_a_dead_server_is_a_warning(httpserver, caplog):
    hook = hook_of(httpserver)
    httpserver.stop()
    with caplog.at_level(logging.WARNING):
        tell_outside([hook], RELEASE)
    httpserver.start()
    assert "rank 3 is released, but the outside has not been told: KubernetesHook: pod trainer-3" in caplog.text


def test_training_goes_on_whatever_the_server_does(httpserver, run_ranks):
    def check(rank, group):
        pipeline = pipelines.pipeline_of(group)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        pipelines.train_step(pipeline, optimizer, 0)
        if repack(pipeline, optimizer, num_stages=1, on_release=[hook]).is_released:
            return None
        return pipelines.train_step(pipeline, optimizer, 1)

    hook = hook_of(httpserver)
    httpserver.stop()
    losses, nothing = run_ranks(check, 2)
    httpserver.start()
    assert len(losses) == 2 and nothing is None


def test_the_clusters_address_and_account_are_found_by_the_client(httpserver, tmp_path, monkeypatch):
    """As a kubeconfig tells them; and the pod is that of this process."""
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "stub", "user": "trainer"}}],
        "clusters": [{"name": "stub", "cluster": {"server": httpserver.url_for("")}}],
        "users": [{"name": "trainer", "user": {"token": "secret"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOSTNAME", "trainer-own")
    httpserver.expect_request("/api/v1/namespaces/training/pods/trainer-own").respond_with_json({"kind": "Pod"})
    KubernetesHook("training", None, "worker", RESOURCES, subresource="none")(RELEASE)
    ((request, _),) = httpserver.log
    assert request.headers["Authorization"] == "Bearer secret"


def test_without_any_account_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(RuntimeError, match="neither a service account of a pod nor a kubeconfig"):
        KubernetesHook("training", "pod", "worker", RESOURCES)(RELEASE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"namespace": ""}, "namespace='' is not allowed"),
        ({"pod": "pod-{node}"}, r"pod='pod-\{node\}' is not allowed: only \{rank\}"),
        ({"resources": {}}, "wanted are 'requests', 'limits' or both"),
        ({"resources": {"request": {"cpu": "1"}}}, "wanted are 'requests', 'limits' or both"),
        ({"subresource": "status"}, "subresource='status' is not allowed"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 is not allowed"),
        ({"timeout_s": "x"}, "timeout_s='x' is not allowed"),
        ({"resources": 3}, "resources=3 is not allowed"),
        ({"container": 3}, "container=3 is not allowed"),
    ],
)
def test_wrong_options_are_errors_at_once(arguments, message):
    right = {"namespace": "training", "pod": "trainer", "container": "worker", "resources": RESOURCES}
    with pytest.raises(ValueError, match=message):
        KubernetesHook(**right | arguments)


def test_a_missing_client_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ImportError, match=r"pip install 'kubernetes>=32'"):
        KubernetesHook("training", "trainer", "worker", RESOURCES)
