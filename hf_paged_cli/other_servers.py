"""Flags of vLLM, SGLang, TGI and `transformers serve` that are no flags here, and what to do instead."""

from __future__ import annotations

TABLE = """\
the model is positional: hf-paged COMMAND MODEL
    --force-model --model --model-id --model-path
the files are positional: hf-paged batch MODEL IN OUT
    --input-file --output-file -i -o
the checkpoint's config decides
    --config-format --hf-config-path --hf-overrides --json-model-override-args --quantization
    --quantize --rope-factor --rope-scaling --rope-theta -q
transformers loads and computes the model
    --ignore-patterns --load-format --max-parallel-loading-workers --model-impl
    --model-loader-extra-config --override-neuron-config --pt-load-map-location
    --safetensors-load-strategy --use-tqdm-on-load
set it for the Hub's client: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE
    --download-dir --hf-token --huggingface-hub-cache --weights-cache-override
give --revision, which is the tokenizer's and the code's, too
    --code-revision --tokenizer-revision
give --tokenizer
    --tokenizer-path
give --tokenizer or --chat-template
    --tokenizer-config-path
the tokenizer is loaded as AutoTokenizer does it
    --skip-tokenizer-init --tokenizer-mode
decoders that generate are served, no embeddings, classes or rewards
    --convert --is-embedding --override-pooler-config --pooler-config --runner --task
the checkpoint's generation config is taken; requests override it
    --generation-config --override-generation-config
give --max-model-len
    --context-length --max-input-length --max-input-tokens --max-total-tokens
the model stays loaded until the server ends
    --model-timeout
give --device-map auto
    --cpu-offload-gb --pipeline-parallel-size -pp
give --served-model-name
    --served-name

sequences may wait in the host's memory, in as many blocks as a pool has; see --preemption
    --kv-offloading-backend --kv-offloading-size --swap-space
give --gpu-memory-utilization
    --cb-max-memory-percent --cuda-memory-fraction --mem-fraction-static
give --num-blocks or --gpu-memory-utilization
    --kv-cache-memory --kv-cache-memory-bytes --max-batch-total-tokens
give --num-blocks
    --cb-num-blocks --max-total-num-tokens --num-gpu-blocks-override
give --block-size
    --cb-block-size --page-size
keys and values have the model's dtype
    --calculate-kv-scales --kv-cache-dtype --mamba-cache-dtype --mamba-ssm-cache-dtype
states of recurrent layers are kept at exact numbers of tokens; see --state-every and --state-snapshots
    --mamba-block-size --mamba-cache-mode --mamba-track-interval
give --state-slots
    --max-mamba-cache-size --mamba-full-memory-ratio
blocks are found by BLAKE2b; --no-enable-prefix-caching turns the cache off
    --prefix-caching-hash-algo
give --no-enable-prefix-caching
    --disable-radix-cache
give --max-num-batched-tokens
    --cb-max-batch-tokens --chunked-prefill-size --long-prefill-token-threshold
    --max-batch-prefill-tokens --max-prefill-tokens
give --max-num-seqs
    --cb-max-batch-size --max-batch-size --max-running-requests
requests are always batched continuously, and prompts in chunks
    --continuous-batching --disable-chunked-mm-input --enable-chunked-prefill --enable-mixed-chunk
    --max-long-partial-prefills --max-num-partial-prefills --max-waiting-tokens
    --waiting-served-ratio
give --preemption
    --preemption-mode
give --scheduling-policy
    --schedule-policy
--admission says when a request may begin
    --schedule-conservativeness --scheduler-delay-factor
a step is launched before the last one's tokens have come, where that is possible
    --async-scheduling --disable-async-output-proc --disable-overlap-schedule
    --multi-step-stream-outputs --num-lookahead-slots --num-scheduler-steps --stream-interval
    --use-async-output-proc
steps are captured where that is possible; --enforce-eager captures none
    --cb-use-cuda-graph --cuda-graph-bs --cuda-graph-max-bs --cuda-graphs --cudagraph-capture-sizes
    --disable-cuda-graph --max-cudagraph-capture-size --max-seq-len-to-capture
give --compile
    --compilation-config --enable-torch-compile --optimization-level -O -O0 -O1 -O2 -O3 -cc
attention is that of --kernels
    --attention-backend --attention-config --attn-implementation --disable-cascade-attn
    --disable-custom-kernels --flash-attn
kinds of layers have pools of their own; windows are the model's
    --disable-hybrid-kv-cache-manager --disable-sliding-window --kv-sharing-fast-prefill
the engine has one scheduler
    --scheduler-cls
the server has no draft models; generate() takes assistant_model
    --num-speculative-tokens --qlora-adapter-name-or-path --speculate --speculative-algorithm
    --speculative-config --speculative-draft-model-path --speculative-model -sc
give --dev, and POST /sleep
    --enable-memory-saver --enable-sleep-mode
give --dev, and POST /load_weights
    --weight-transfer-config

start one server per device, or let Ray Serve do it (docs/ray.md)
    --data-parallel-address --data-parallel-backend --data-parallel-external-lb
    --data-parallel-hybrid-lb --data-parallel-rank --data-parallel-rpc-port --data-parallel-size
    --data-parallel-size-local --data-parallel-start-rank --dp-size -dp
give --tensor-parallel-size
    --num-shard --tp-size -tp
ranks of one host find each other; give --tensor-parallel-size alone
    --decode-context-parallel-size --disable-custom-all-reduce --dist-init-addr
    --distributed-executor-backend --headless --master-addr --master-port --nccl-port --nnodes
    --node-rank --prefill-context-parallel-size --ray-workers-use-nsight --shard-uds-path --sharded
    --worker-cls --worker-extension-cls --worker-use-ray -dcp -n -r
experts are divided as the model's tp_plan says
    --all2all-backend --enable-dbo --enable-eplb --enable-expert-parallel --ep-size --eplb-config
    --expert-placement-strategy --num-redundant-experts -ep
prompts and answers are computed in one process; no keys and values are sent
    --disaggregation-mode --ec-transfer-config --kv-events-config --kv-transfer-config

the engine takes adapters of any rank
    --lora-extra-vocab-size --max-lora-rank
adapters have the model's dtype
    --lora-dtype
give --max-loras; adapters beyond wait in the host's memory
    --max-cpu-loras --max-loaded-loras --max-loras-per-batch
give --lora-modules
    --default-mm-loras --lora-adapters --lora-paths --lora-target-modules
each rank has its part of an adapter
    --fully-sharded-loras
give adapters of all kinds by --lora-modules
    --enable-lora-bias --enable-prompt-adapter --max-prompt-adapters --prompt-adapters
adapters keep the scaling of their config
    --long-lora-scaling-factors

the tokenizer's response template decides; --response-template gives one
    --reasoning-parser --reasoning-parser-plugin --tool-call-parser --tool-parser-plugin
tools need no flag
    --enable-auto-tool-choice --exclude-tools-when-tool-choice-none
clients call tools
    --tool-server
structured output is by llguidance: pip install 'hf_paged[structured]'
    --grammar-backend --guided-decoding-backend --guided-decoding-disable-additional-properties
    --guided-decoding-disable-fallback
JSON is compact; requests allow blanks by structured_outputs
    --constrained-json-disable-any-whitespace --constrained-json-whitespace-pattern
    --guided-decoding-disable-any-whitespace --structured-outputs-config
requests give a form or none; pip install 'hf_paged[structured]' adds them
    --disable-grammar-support
no route answers typed decisions; requests have response_format
    --decision-config
the template gets texts
    --chat-template-content-format
requests have chat_template_kwargs
    --chat-template-kwargs --default-chat-template-kwargs
requests have reasoning_effort and chat_template_kwargs
    --reasoning
a request cannot bring a template
    --trust-request-chat-template
answers have the role assistant
    --response-role
requests have return_tokens_as_token_ids
    --return-tokens-as-token-ids --tokens-only
requests have prompt ids; embeddings are for Engine.submit(inputs_embeds=...)
    --enable-prompt-embeds
give --limit-logprobs
    --max-logprobs --max-top-n-tokens
logprobs are the model's own, before any processor
    --logprobs-mode
give processors to Engine.submit(logits_processor=...)
    --io-processor-plugin --logits-processor-pattern --logits-processors
give --max-tokens; with serve, max_tokens in each request
    --max-new-tokens
give --seed
    --default-seed --random-seed
usage has cached_tokens and comes with each whole answer; streams have stream_options
    --enable-cache-report --enable-force-include-usage --enable-prompt-tokens-details
give --limit-n
    --max-best-of
give --limit-waiting, above which requests are refused with 429
    --max-concurrent-requests
give --limit-stop
    --max-stop-sequences
give --limit-prompts
    --max-client-batch-size
requests have prompt_logprobs; see --limit-shown-tokens
    --enable-prefill-logprobs
answers have no watermark; generate() takes watermarking_config
    --watermark-delta --watermark-gamma
POST /tokenize and /detokenize need no flag
    --enable-tokenizer-info-endpoint

see --limit-images and --limit-image-pixels
    --limit-mm-per-prompt --mm-processor-kwargs
see --limit-media-bytes
    --disable-mm-preprocessor-cache --mm-processor-cache-gb --mm-processor-cache-type
    --mm-shm-cache-max-object-size-mb
images come in data: URLs, or from --allowed-media-domains
    --allowed-local-media-path --media-io-kwargs
the model's processor decides
    --enable-mm-embeds --enable-multimodal --enable-multimodal-encoder-data-parallel
    --interleave-mm-strings --language-model-only --mm-encoder-attn-backend --mm-encoder-only
    --mm-encoder-tp-mode --skip-mm-profiling --video-pruning-rate

give --allowed-origin for each origin whose pages may call, * for any
    --allow-credentials --allowed-headers --allowed-methods --allowed-origins --cors-allow-origin
    --enable-cors
give --host
    --hostname
give --ssl-ca-certs, and clients need a certificate
    --ssl-cert-reqs
let a proxy in front decide
    --enable-ssl-refresh --middleware --ngrok --ngrok-authtoken --ngrok-edge --ssl-ciphers
a request's head has 64 KiB and 10 s
    --h11-max-header-count --h11-max-incomplete-event-size
give --limit-body-bytes
    --payload-limit
one process answers over HTTP, and one has the engine
    --api-server-count --disable-frontend-multiprocessing --tokenizer-worker-num
    --validation-workers -asc
answers have x-request-id
    --enable-request-id-headers
GET /load needs no flag
    --enable-server-load-tracking
/docs and /openapi.json are always there; they hold no data, and load nothing from elsewhere
    --disable-fastapi-docs --enable-offline-docs
flags are given on the command line
    --config
SIGTERM waits --limit-drain-seconds for answers
    --graceful-termination-timeout --shutdown-timeout

no line of the log has a prompt or an answer; --log-level warning drops those of requests
    --disable-log-requests --enable-log-deltas --enable-log-outputs --enable-log-requests
    --log-requests --max-log-len
give --log-level and --log-format
    --aggregate-engine-logging --disable-access-log-for-endpoints --disable-uvicorn-access-log
    --json-output --log-config-file --log-error-stack --uvicorn-log-level
leave it out: GET /metrics has what is counted
    --cudagraph-metrics --disable-log-stats --enable-metrics --enable-mfu-metrics --kv-cache-metrics
    --kv-cache-metrics-sample --prometheus-port --show-hidden-metrics-for-version
give --otlp-traces-endpoint
    --collect-detailed-traces --otlp-endpoint --otlp-service-name
run torch.profiler around Engine.step()
    --enable-layerwise-nvtx-tracing --profiler-config
run hf-paged info
    --env
leave it out: no usage statistics are sent
    --usage-stats
leave it out: it has no meaning here
    --additional-config
"""
"""An advice on each line, and below it the flags whose users get it."""


def _read(table: str) -> dict[str, str]:
    """The advice by flag."""
    found: dict[str, str] = {}
    advice = ""
    for line in filter(None, table.splitlines()):
        if line.startswith(" "):
            found.update(dict.fromkeys(line.split(), advice))
        else:
            advice = line
    return found


ABSENT = _read(TABLE)


def advice_for(flag: str) -> str | None:
    """The advice for a flag of another server; None for one that it does not know. A part of a config
    (`--compilation-config.mode`) and a negation have the advice of the flag.
    """
    name = flag.partition("=")[0].partition(".")[0].replace("_", "-")
    return ABSENT.get(name) or ABSENT.get(name.replace("--no-", "--", 1))
