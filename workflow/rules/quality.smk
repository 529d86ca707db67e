# How exact each engine configuration is: the fp32 model's tokens and distributions, then one process a configuration.

# The model and the prompts of the scoring, where it has its own: made as the run's are, from a config of their own.
if own_model(CONFIG):
    QUALITY_CONFIG = f"work/{RUN}/quality/config.yaml"
    SCORED_CONFIG = scored_config(CONFIG)

    rule quality_config:
        output:
            QUALITY_CONFIG,
        log:
            f"{LOGS}/quality_config.log",
        priority: FIRST
        container:
            image(STACKS[0])
        resources:
            config=CONFIG_PATH,
            gpu=0,
        params:
            scored=SCORED_CONFIG.model_dump_json(),
        shell:
            "flexroll quality-config --config {resources.config:q} --out {output} 2>&1 | tee {log}"

    use rule model as quality_model with:
        input:
            preflight=ancient(PREFLIGHT),
            config=QUALITY_CONFIG,
        output:
            f"{SCORED}/model.json",
        log:
            f"{LOGS}/quality_model.log",
        resources:
            config=QUALITY_CONFIG,
            gpu=0,
            stack=STACKS[0],
        params:
            model=SCORED_CONFIG.model.model_dump_json(),
            code=CODE["model"],

    use rule prompts as quality_prompts with:
        input:
            model=f"{SCORED}/model.json",
            config=QUALITY_CONFIG,
        output:
            f"{SCORED}/prompts.json",
        log:
            f"{LOGS}/quality_prompts.log",
        resources:
            config=QUALITY_CONFIG,
            gpu=0,
            stack=STACKS[0],
        params:
            prompts=SCORED_CONFIG.prompts.model_dump_json(),
            code=CODE["prompts"],
            needed=[needed_prompts(SCORED_CONFIG), longest_prompt(SCORED_CONFIG)],

    use rule adapter as quality_adapter with:
        input:
            model=f"{SCORED}/model.json",
        output:
            directory(f"{SCORED}/adapter"),
        log:
            f"{LOGS}/quality_adapter.log",

    use rule merge as quality_merge with:
        input:
            model=f"{SCORED}/model.json",
            adapter=f"{SCORED}/adapter",
        output:
            directory(f"{SCORED}/merged"),
        log:
            f"{LOGS}/quality_merge.log",

    use rule quantise as quality_quantise with:
        input:
            model=f"{SCORED}/model.json",
            config=QUALITY_CONFIG,
        output:
            directory(f"{SCORED}/{SHARD}"),
        log:
            f"{LOGS}/quality_quantise.log",
        resources:
            config=QUALITY_CONFIG,
            gpu=int(DEVICE != "cpu"),
            stack=SHARD_STACK,
        params:
            dtype=SCORED_CONFIG.model.dtype,
            four_bit=CONFIG.four_bit.model_dump_json(),
            code=CODE["quantise"],
            lock=LOCKS[SHARD_STACK],
            device=DEVICE,


if TARGETS:

    rule quality_reference:
        input:
            model=f"{SCORED}/model.json",
            prompts=f"{SCORED}/prompts.json",
            adapter=lambda wildcards: f"{SCORED}/adapter" if wildcards.weights == "adapter" else [],
        output:
            f"work/{RUN}/quality/reference-{{weights}}.safetensors",
        log:
            f"{LOGS}/quality_reference-{{weights}}.log",
        container:
            image(STACKS[0])
        threads: CORES
        resources:
            config=CONFIG_PATH,
            gpu=int(DEVICE != "cpu"),
            stack=STACKS[0],
        params:
            asked=[CONFIG.quality.count, CONFIG.quality.new_tokens],
            code=CODE["quality_reference"],
            work=lambda wildcards: f"work/{RUN}",
            adapter=lambda wildcards: "--adapter" if wildcards.weights == "adapter" else "",
        shell:
            "flexroll --stack {resources.stack} quality-reference --config {resources.config:q} --work {params.work}"
            " {params.adapter} --out {output} 2>&1 | tee {log}"

    rule quality:
        input:
            unpack(lambda wildcards: quality_inputs(TARGETS[wildcards.engine])),
        output:
            f"results/{RUN}/quality/{{engine}}.json",
        log:
            f"{LOGS}/quality-{{engine}}.log",
        container:
            lambda wildcards: image(TARGETS[wildcards.engine].stack)
        # Scorings that share a device share its cores, which is what keeps measurements away.
        threads: lambda wildcards: max(1, CORES // SEATS[wildcards.engine])
        resources:
            config=CONFIG_PATH,
            gpu=lambda wildcards: int(DEVICE != "cpu" and SEATS[wildcards.engine] == 1),
            runtime=int((CONFIG.limits.start_s + CONFIG.limits.cell_s) / 60) + 1,
        params:
            stack=lambda wildcards: TARGETS[wildcards.engine].stack,
            key=lambda wildcards: QUALITY_KEYS[wildcards.engine],
            work=lambda wildcards: f"work/{RUN}",
        shell:
            "flexroll --stack {params.stack} quality --config {resources.config:q} --engine {wildcards.engine}"
            " --work {params.work} --out {output} 2>&1 | tee {log}"
