"""Root of ragorder's errors.

RagorderError
  ClientGoneError                 ragorder.adapters.http_server.request_body
  EmbeddedRequestError            ragorder.adapters.embedded.streams
    EmbeddedTimeoutError          ragorder.adapters.embedded.streams
  EngineStoppedError              ragorder.adapters.embedded.worker
  HTTPError                       ragorder.adapters.http_server.errors
    UpstreamError                 ragorder.adapters.proxy.upstream
      RefusedError                ragorder.adapters.proxy.fleet
      ReplicaLostError            ragorder.adapters.ray.transport
  MalformedDocumentsError         ragorder.adapters.ray.ordered_calls
  RenderError                     ragorder.adapters.doctor.case
  ServerError                     ragorder.adapters.http_client
    AddressError                  ragorder.adapters.http_client
  TemplateError                   ragorder.adapters.proxy.bodies.template
  TooManyAtOnceError              ragorder.adapters.embedded.worker
  TooManyValuesError              ragorder.adapters.http_server.untrusted_json
  TooManyWaitingError             ragorder.adapters.embedded.worker
  UnknownWeightsError             ragorder.adapters.vllm_tiers.disk_identity
  UnreadableError                 ragorder.adapters.shared_orders.orderer
  UnsupportedRayError             ragorder.adapters.ray.application
  UnsupportedVLLMError            ragorder.adapters.vllm_tiers.versions
  WorkerError                     ragorder.adapters.http_server.processes
  BadHeaderError                  ragorder.kernels.store.format
  BuildError                      ragorder.kernels.preprocessing.manifest
    ManifestError                 ragorder.kernels.preprocessing.manifest
      NoBuildError                ragorder.kernels.preprocessing.manifest
  CheckpointError                 ragorder.kernels.offload.checkpoint
  DeviceLostError                 ragorder.kernels.engine.request
  LayerReadError                  ragorder.kernels.offload.checkpoint
  ModelLoadError                  ragorder.kernels.models.loading
  OutOfBlocksError                ragorder.kernels.paging.pool
  RequestRefusedError             ragorder.kernels.engine.request
    ShortOfMemoryError            ragorder.kernels.engine.request
  StoreRefusedError               ragorder.kernels.store.folder
  UnsupportedModelError           ragorder.kernels.models.support
  WriteFailedError                ragorder.kernels.preprocessing.builder
  AnswerChangedError              ragorder.pipelining.batching.requests
  PlacementError                  ragorder.pipelining.placement.fit
  QueueFullError                  ragorder.pipelining.reordering
  WorkflowError                   ragorder.pipelining.workflow.nodes
    DeadlineError                 ragorder.pipelining.workflow.nodes
    GraphError                    ragorder.pipelining.workflow.nodes
      RoundsError                 ragorder.pipelining.workflow.nodes
    NodeError                     ragorder.pipelining.workflow.nodes
    RefusedSearchError            ragorder.pipelining.workflow.nodes
    UnknownNameError              ragorder.pipelining.workflow.nodes
    UnknownValueError             ragorder.pipelining.workflow.nodes
    UnusableValueError            ragorder.pipelining.workflow.nodes
  CorpusError                     ragorder.common.corpus
  JSONLinesError                  ragorder.common.jsonl
  LineError                       ragorder.cli.planning.requests
  PlanError                       ragorder.cli.planning.run
  ReentryError                    ragorder.common.lock
  ArrivalsError                   ragorder.eval.data.arrivals
  BenchError                      ragorder.eval.running.specs
  EngineError                     ragorder.eval.engines.base
  HarnessError                    ragorder.eval.running.options
  LogError                        ragorder.eval.replay.log
  PeerError                       ragorder.eval.peers.environment
  PolicyError                     ragorder.eval.running.policies
  QualityError                    ragorder.eval.suites.quality.orders
  ReplayError                     ragorder.eval.replay.sweep
  RequestError                    ragorder.eval.engines.base
  ResultsError                    ragorder.eval.running.reading
  StatisticsError                 ragorder.eval.report.statistics
  StoreError                      ragorder.eval.running.store
  SuiteError                      ragorder.eval.running.cells
  WorkloadError                   ragorder.eval.data.workloads
"""

from __future__ import annotations


class RagorderError(Exception):
    """Base of all errors that ragorder defines. Most are also ValueErrors, RuntimeErrors or OSErrors."""
