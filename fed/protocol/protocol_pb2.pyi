from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskId(_message.Message):
    __slots__ = ("start", "number")
    START_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    start: int
    number: int
    def __init__(self, start: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "numbers")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    numbers: int
    def __init__(self, dtype: _Optional[str] = ..., numbers: _Optional[int] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("sha256", "size_bytes", "tensors")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Signature(_message.Message):
    __slots__ = ("input_shape", "input_dtype", "classes", "columns", "labels", "names_sha256", "target_shape", "target_dtype", "form")
    INPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    INPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    NAMES_SHA256_FIELD_NUMBER: _ClassVar[int]
    TARGET_SHAPE_FIELD_NUMBER: _ClassVar[int]
    TARGET_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    input_shape: _containers.RepeatedScalarFieldContainer[int]
    input_dtype: str
    classes: int
    columns: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.RepeatedScalarFieldContainer[str]
    names_sha256: str
    target_shape: _containers.RepeatedScalarFieldContainer[int]
    target_dtype: str
    form: str
    def __init__(self, input_shape: _Optional[_Iterable[int]] = ..., input_dtype: _Optional[str] = ..., classes: _Optional[int] = ..., columns: _Optional[_Iterable[str]] = ..., labels: _Optional[_Iterable[str]] = ..., names_sha256: _Optional[str] = ..., target_shape: _Optional[_Iterable[int]] = ..., target_dtype: _Optional[str] = ..., form: _Optional[str] = ...) -> None: ...

class Joining(_message.Message):
    __slots__ = ("protocol", "software", "name", "samples", "signature", "held", "hides_numbers", "table_sha256", "code_sha256", "ledger")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HIDES_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TABLE_SHA256_FIELD_NUMBER: _ClassVar[int]
    CODE_SHA256_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    software: str
    name: str
    samples: int
    signature: Signature
    held: _containers.RepeatedCompositeFieldContainer[TaskId]
    hides_numbers: bool
    table_sha256: bytes
    code_sha256: bytes
    ledger: LedgerHead
    def __init__(self, protocol: _Optional[int] = ..., software: _Optional[str] = ..., name: _Optional[str] = ..., samples: _Optional[int] = ..., signature: _Optional[_Union[Signature, _Mapping]] = ..., held: _Optional[_Iterable[_Union[TaskId, _Mapping]]] = ..., hides_numbers: bool = ..., table_sha256: _Optional[bytes] = ..., code_sha256: _Optional[bytes] = ..., ledger: _Optional[_Union[LedgerHead, _Mapping]] = ...) -> None: ...

class LedgerHead(_message.Message):
    __slots__ = ("count", "sha256")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    count: int
    sha256: bytes
    def __init__(self, count: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Code(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("schema",)
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    schema: str
    def __init__(self, schema: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("run", "experiment", "signature", "heartbeat_s", "format", "identities", "fixed_part")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    FIXED_PART_FIELD_NUMBER: _ClassVar[int]
    run: str
    experiment: str
    signature: Signature
    heartbeat_s: float
    format: Format
    identities: bytes
    fixed_part: Payload
    def __init__(self, run: _Optional[str] = ..., experiment: _Optional[str] = ..., signature: _Optional[_Union[Signature, _Mapping]] = ..., heartbeat_s: _Optional[float] = ..., format: _Optional[_Union[Format, _Mapping]] = ..., identities: _Optional[bytes] = ..., fixed_part: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class Format(_message.Message):
    __slots__ = ("dtype", "parts", "buffers", "integers", "parameters", "broadcast", "sends_models", "most_clients")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    INTEGERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    SENDS_MODELS_FIELD_NUMBER: _ClassVar[int]
    MOST_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    parts: _containers.RepeatedScalarFieldContainer[int]
    buffers: int
    integers: int
    parameters: int
    broadcast: _containers.RepeatedScalarFieldContainer[int]
    sends_models: bool
    most_clients: int
    def __init__(self, dtype: _Optional[str] = ..., parts: _Optional[_Iterable[int]] = ..., buffers: _Optional[int] = ..., integers: _Optional[int] = ..., parameters: _Optional[int] = ..., broadcast: _Optional[_Iterable[int]] = ..., sends_models: bool = ..., most_clients: _Optional[int] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("number", "after")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    number: int
    after: str
    def __init__(self, number: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("task", "round", "repeats", "lr", "steps", "broadcast_count", "population", "place", "payload", "kept_after", "durable_after", "deadline_s", "takes_parts", "kept_discount", "reference", "since", "differences", "attempt", "clip", "model_sha256", "ledger", "lost_after")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_COUNT_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEPT_AFTER_FIELD_NUMBER: _ClassVar[int]
    DURABLE_AFTER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TAKES_PARTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_DISCOUNT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    MODEL_SHA256_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    LOST_AFTER_FIELD_NUMBER: _ClassVar[int]
    task: TaskId
    round: int
    repeats: int
    lr: float
    steps: int
    broadcast_count: int
    population: int
    place: int
    payload: Payload
    kept_after: TaskId
    durable_after: TaskId
    deadline_s: float
    takes_parts: bool
    kept_discount: float
    reference: str
    since: str
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    attempt: int
    clip: float
    model_sha256: bytes
    ledger: LedgerHead
    lost_after: _containers.RepeatedCompositeFieldContainer[TaskId]
    def __init__(self, task: _Optional[_Union[TaskId, _Mapping]] = ..., round: _Optional[int] = ..., repeats: _Optional[int] = ..., lr: _Optional[float] = ..., steps: _Optional[int] = ..., broadcast_count: _Optional[int] = ..., population: _Optional[int] = ..., place: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., kept_after: _Optional[_Union[TaskId, _Mapping]] = ..., durable_after: _Optional[_Union[TaskId, _Mapping]] = ..., deadline_s: _Optional[float] = ..., takes_parts: bool = ..., kept_discount: _Optional[float] = ..., reference: _Optional[str] = ..., since: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., attempt: _Optional[int] = ..., clip: _Optional[float] = ..., model_sha256: _Optional[bytes] = ..., ledger: _Optional[_Union[LedgerHead, _Mapping]] = ..., lost_after: _Optional[_Iterable[_Union[TaskId, _Mapping]]] = ...) -> None: ...

class Examination(_message.Message):
    __slots__ = ("id", "payload", "kept_after", "kept_discount", "round")
    ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEPT_AFTER_FIELD_NUMBER: _ClassVar[int]
    KEPT_DISCOUNT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    id: int
    payload: Payload
    kept_after: TaskId
    kept_discount: float
    round: int
    def __init__(self, id: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., kept_after: _Optional[_Union[TaskId, _Mapping]] = ..., kept_discount: _Optional[float] = ..., round: _Optional[int] = ...) -> None: ...

class Withdrawal(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: TaskId
    def __init__(self, task: _Optional[_Union[TaskId, _Mapping]] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason", "is_final", "is_refusal")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_FIELD_NUMBER: _ClassVar[int]
    IS_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_final: bool
    is_refusal: bool
    def __init__(self, reason: _Optional[str] = ..., is_final: bool = ..., is_refusal: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[TaskId]
    def __init__(self, held: _Optional[_Iterable[_Union[TaskId, _Mapping]]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("task", "reason", "diverged", "lacks_model", "lacks_fixed_part")
    TASK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    LACKS_MODEL_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIXED_PART_FIELD_NUMBER: _ClassVar[int]
    task: TaskId
    reason: str
    diverged: bool
    lacks_model: bool
    lacks_fixed_part: bool
    def __init__(self, task: _Optional[_Union[TaskId, _Mapping]] = ..., reason: _Optional[str] = ..., diverged: bool = ..., lacks_model: bool = ..., lacks_fixed_part: bool = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("id", "samples", "loss", "problem", "metrics")
    ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    id: int
    samples: int
    loss: float
    problem: str
    metrics: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., samples: _Optional[int] = ..., loss: _Optional[float] = ..., problem: _Optional[str] = ..., metrics: _Optional[_Iterable[float]] = ...) -> None: ...

class ToNode(_message.Message):
    __slots__ = ("plan", "assignment", "withdrawal", "examination", "heartbeat", "farewell", "session", "table", "code")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    EXAMINATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    assignment: Assignment
    withdrawal: Withdrawal
    examination: Examination
    heartbeat: Heartbeat
    farewell: Farewell
    session: ToSession
    table: Table
    code: Code
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., withdrawal: _Optional[_Union[Withdrawal, _Mapping]] = ..., examination: _Optional[_Union[Examination, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., session: _Optional[_Union[ToSession, _Mapping]] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., code: _Optional[_Union[Code, _Mapping]] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("joining", "accepted", "heartbeat", "failed", "scores", "session", "farewell")
    JOINING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    joining: Joining
    accepted: TaskId
    heartbeat: Heartbeat
    failed: Failed
    scores: Scores
    session: FromSession
    farewell: Farewell
    def __init__(self, joining: _Optional[_Union[Joining, _Mapping]] = ..., accepted: _Optional[_Union[TaskId, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ..., session: _Optional[_Union[FromSession, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("sha256", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "crc32")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    crc32: int
    def __init__(self, data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("task", "payload", "offset", "weight", "samples", "train_loss", "began_anew", "metrics")
    TASK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_ANEW_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    task: TaskId
    payload: Payload
    offset: int
    weight: float
    samples: int
    train_loss: float
    began_anew: bool
    metrics: _containers.RepeatedCompositeFieldContainer[NamedNumber]
    def __init__(self, task: _Optional[_Union[TaskId, _Mapping]] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., offset: _Optional[int] = ..., weight: _Optional[float] = ..., samples: _Optional[int] = ..., train_loss: _Optional[float] = ..., began_anew: bool = ..., metrics: _Optional[_Iterable[_Union[NamedNumber, _Mapping]]] = ...) -> None: ...

class NamedNumber(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("answer", "chunk")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    answer: Answer
    chunk: Chunk
    def __init__(self, answer: _Optional[_Union[Answer, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("accepted", "received_bytes", "reason")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    received_bytes: int
    reason: str
    def __init__(self, accepted: bool = ..., received_bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("plan", "assignment", "examination")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EXAMINATION_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    assignment: Assignment
    examination: Examination
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., examination: _Optional[_Union[Examination, _Mapping]] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("joining", "answer", "failed", "scores")
    JOINING_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    joining: Joining
    answer: Answer
    failed: Failed
    scores: Scores
    def __init__(self, joining: _Optional[_Union[Joining, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ...) -> None: ...

class SessionKeys(_message.Message):
    __slots__ = ("sealing", "masking", "signature")
    SEALING_FIELD_NUMBER: _ClassVar[int]
    MASKING_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    sealing: bytes
    masking: bytes
    signature: bytes
    def __init__(self, sealing: _Optional[bytes] = ..., masking: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ListedClient(_message.Message):
    __slots__ = ("name", "keys_sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEYS_SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    keys_sha256: bytes
    def __init__(self, name: _Optional[str] = ..., keys_sha256: _Optional[bytes] = ...) -> None: ...

class PlacedKeys(_message.Message):
    __slots__ = ("place", "keys")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    place: int
    keys: SessionKeys
    def __init__(self, place: _Optional[int] = ..., keys: _Optional[_Union[SessionKeys, _Mapping]] = ...) -> None: ...

class ClientList(_message.Message):
    __slots__ = ("clients",)
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedCompositeFieldContainer[ListedClient]
    def __init__(self, clients: _Optional[_Iterable[_Union[ListedClient, _Mapping]]] = ...) -> None: ...

class KeyList(_message.Message):
    __slots__ = ("clients", "neighbours")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    clients: bytes
    neighbours: _containers.RepeatedCompositeFieldContainer[PlacedKeys]
    def __init__(self, clients: _Optional[bytes] = ..., neighbours: _Optional[_Iterable[_Union[PlacedKeys, _Mapping]]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("place", "sealed")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    place: int
    sealed: bytes
    def __init__(self, place: _Optional[int] = ..., sealed: _Optional[bytes] = ...) -> None: ...

class SealedShares(_message.Message):
    __slots__ = ("seed_sha256", "boxes")
    SEED_SHA256_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    seed_sha256: bytes
    boxes: _containers.RepeatedCompositeFieldContainer[Box]
    def __init__(self, seed_sha256: _Optional[bytes] = ..., boxes: _Optional[_Iterable[_Union[Box, _Mapping]]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("boxes",)
    BOXES_FIELD_NUMBER: _ClassVar[int]
    boxes: _containers.RepeatedCompositeFieldContainer[Box]
    def __init__(self, boxes: _Optional[_Iterable[_Union[Box, _Mapping]]] = ...) -> None: ...

class Survivors(_message.Message):
    __slots__ = ("places",)
    PLACES_FIELD_NUMBER: _ClassVar[int]
    places: bytes
    def __init__(self, places: _Optional[bytes] = ...) -> None: ...

class Consent(_message.Message):
    __slots__ = ("signature",)
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signature: bytes
    def __init__(self, signature: _Optional[bytes] = ...) -> None: ...

class PlacedConsent(_message.Message):
    __slots__ = ("place", "signature")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    place: int
    signature: bytes
    def __init__(self, place: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Consents(_message.Message):
    __slots__ = ("consents",)
    CONSENTS_FIELD_NUMBER: _ClassVar[int]
    consents: _containers.RepeatedCompositeFieldContainer[PlacedConsent]
    def __init__(self, consents: _Optional[_Iterable[_Union[PlacedConsent, _Mapping]]] = ...) -> None: ...

class RevealedShare(_message.Message):
    __slots__ = ("place", "share")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    place: int
    share: bytes
    def __init__(self, place: _Optional[int] = ..., share: _Optional[bytes] = ...) -> None: ...

class Unmasking(_message.Message):
    __slots__ = ("seeds", "keys")
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    seeds: _containers.RepeatedCompositeFieldContainer[RevealedShare]
    keys: _containers.RepeatedCompositeFieldContainer[RevealedShare]
    def __init__(self, seeds: _Optional[_Iterable[_Union[RevealedShare, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[RevealedShare, _Mapping]]] = ...) -> None: ...

class ToSession(_message.Message):
    __slots__ = ("task", "attempt", "key_list", "delivery", "survivors", "consents")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEY_LIST_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    CONSENTS_FIELD_NUMBER: _ClassVar[int]
    task: TaskId
    attempt: int
    key_list: KeyList
    delivery: Delivery
    survivors: Survivors
    consents: Consents
    def __init__(self, task: _Optional[_Union[TaskId, _Mapping]] = ..., attempt: _Optional[int] = ..., key_list: _Optional[_Union[KeyList, _Mapping]] = ..., delivery: _Optional[_Union[Delivery, _Mapping]] = ..., survivors: _Optional[_Union[Survivors, _Mapping]] = ..., consents: _Optional[_Union[Consents, _Mapping]] = ...) -> None: ...

class FromSession(_message.Message):
    __slots__ = ("task", "attempt", "keys", "shares", "consent", "unmasking", "aborted")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    UNMASKING_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    task: TaskId
    attempt: int
    keys: SessionKeys
    shares: SealedShares
    consent: Consent
    unmasking: Unmasking
    aborted: str
    def __init__(self, task: _Optional[_Union[TaskId, _Mapping]] = ..., attempt: _Optional[int] = ..., keys: _Optional[_Union[SessionKeys, _Mapping]] = ..., shares: _Optional[_Union[SealedShares, _Mapping]] = ..., consent: _Optional[_Union[Consent, _Mapping]] = ..., unmasking: _Optional[_Union[Unmasking, _Mapping]] = ..., aborted: _Optional[str] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("protocol", "software", "name", "start", "address", "experiment", "is_introduction")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    IS_INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    software: str
    name: str
    start: int
    address: str
    experiment: str
    is_introduction: bool
    def __init__(self, protocol: _Optional[int] = ..., software: _Optional[str] = ..., name: _Optional[str] = ..., start: _Optional[int] = ..., address: _Optional[str] = ..., experiment: _Optional[str] = ..., is_introduction: bool = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "address", "start", "beat", "left", "samples", "is_ready", "has_ended")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    start: int
    beat: int
    left: bool
    samples: int
    is_ready: bool
    has_ended: bool
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., start: _Optional[int] = ..., beat: _Optional[int] = ..., left: bool = ..., samples: _Optional[int] = ..., is_ready: bool = ..., has_ended: bool = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("members", "is_answer")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    is_answer: bool
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., is_answer: bool = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("round", "durable", "generation")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    round: int
    durable: int
    generation: int
    def __init__(self, round: _Optional[int] = ..., durable: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Vectors(_message.Message):
    __slots__ = ("round", "exchange", "view", "payload", "before")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    round: int
    exchange: int
    view: str
    payload: Payload
    before: str
    def __init__(self, round: _Optional[int] = ..., exchange: _Optional[int] = ..., view: _Optional[str] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., before: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("round", "exchange", "taken", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: int
    exchange: int
    taken: bool
    reason: str
    def __init__(self, round: _Optional[int] = ..., exchange: _Optional[int] = ..., taken: bool = ..., reason: _Optional[str] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("round", "payload")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    round: int
    payload: Payload
    def __init__(self, round: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class CopyWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Revocations(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("number", "proposer")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    number: int
    proposer: str
    def __init__(self, number: _Optional[int] = ..., proposer: _Optional[str] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("ballot", "sum_sha256", "contributors", "members")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    SUM_SHA256_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ballot: Ballot
    sum_sha256: str
    contributors: _containers.RepeatedScalarFieldContainer[str]
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ballot: _Optional[_Union[Ballot, _Mapping]] = ..., sum_sha256: _Optional[str] = ..., contributors: _Optional[_Iterable[str]] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Decree(_message.Message):
    __slots__ = ("kind", "round", "ballot", "vote", "names", "sum_sha256", "is_ready")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SUM_SHA256_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    round: int
    ballot: Ballot
    vote: Vote
    names: _containers.RepeatedScalarFieldContainer[str]
    sum_sha256: str
    is_ready: bool
    def __init__(self, kind: _Optional[str] = ..., round: _Optional[int] = ..., ballot: _Optional[_Union[Ballot, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ..., sum_sha256: _Optional[str] = ..., is_ready: bool = ...) -> None: ...

class Founding(_message.Message):
    __slots__ = ("members", "is_agreed", "is_founded", "round")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_AGREED_FIELD_NUMBER: _ClassVar[int]
    IS_FOUNDED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[str]
    is_agreed: bool
    is_founded: bool
    round: int
    def __init__(self, members: _Optional[_Iterable[str]] = ..., is_agreed: bool = ..., is_founded: bool = ..., round: _Optional[int] = ...) -> None: ...

class RingPart(_message.Message):
    __slots__ = ("round", "ballot", "step", "payload")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    round: int
    ballot: Ballot
    step: int
    payload: Payload
    def __init__(self, round: _Optional[int] = ..., ballot: _Optional[_Union[Ballot, _Mapping]] = ..., step: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class Sum(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: Payload
    def __init__(self, payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class SumWanted(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("greeting", "members", "progress", "vectors", "chunk", "verdict", "copy_wanted", "copy", "farewell", "founding", "decree", "ring_part", "sum", "sum_wanted", "revocations")
    GREETING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    COPY_WANTED_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    FOUNDING_FIELD_NUMBER: _ClassVar[int]
    DECREE_FIELD_NUMBER: _ClassVar[int]
    RING_PART_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    SUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    greeting: Greeting
    members: Members
    progress: Progress
    vectors: Vectors
    chunk: Chunk
    verdict: Verdict
    copy_wanted: CopyWanted
    copy: Copy
    farewell: Farewell
    founding: Founding
    decree: Decree
    ring_part: RingPart
    sum: Sum
    sum_wanted: SumWanted
    revocations: Revocations
    def __init__(self, greeting: _Optional[_Union[Greeting, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., vectors: _Optional[_Union[Vectors, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., copy_wanted: _Optional[_Union[CopyWanted, _Mapping]] = ..., copy: _Optional[_Union[Copy, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., founding: _Optional[_Union[Founding, _Mapping]] = ..., decree: _Optional[_Union[Decree, _Mapping]] = ..., ring_part: _Optional[_Union[RingPart, _Mapping]] = ..., sum: _Optional[_Union[Sum, _Mapping]] = ..., sum_wanted: _Optional[_Union[SumWanted, _Mapping]] = ..., revocations: _Optional[_Union[Revocations, _Mapping]] = ...) -> None: ...
