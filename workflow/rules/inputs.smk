# What benchmarks read: the machine's facts, the checkpoint, the prompts, the adapter, the merged checkpoint.


rule preflight:
    output:
        PREFLIGHT,
    log:
        f"{LOGS}/preflight.log",
    priority: FIRST
    container:
        image(STACKS[0])
    resources:
        config=CONFIG_PATH,
        gpu=0,
    shell:
        "flexroll preflight --config {resources.config:q} --out {output} 2>&1 | tee {log}"


rule model:
    input:
        preflight=ancient(PREFLIGHT),
    output:
        f"work/{RUN}/model.json",
    log:
        f"{LOGS}/model.log",
    priority: FIRST
    container:
        image(STACKS[0])
    resources:
        config=CONFIG_PATH,
        gpu=0,
        stack=STACKS[0],
    params:
        model=CONFIG.model.model_dump_json(),
        code=CODE["model"],
    shell:
        "flexroll --stack {resources.stack} model --config {resources.config:q} --out {output} 2>&1 | tee {log}"


rule prompts:
    input:
        model=f"work/{RUN}/model.json",
    output:
        f"work/{RUN}/prompts.json",
    log:
        f"{LOGS}/prompts.log",
    priority: FIRST
    container:
        image(STACKS[0])
    resources:
        config=CONFIG_PATH,
        gpu=0,
        stack=STACKS[0],
    params:
        prompts=CONFIG.prompts.model_dump_json(),
        code=CODE["prompts"],
        needed=PROMPTS,
    shell:
        "flexroll --stack {resources.stack} prompts --config {resources.config:q} --model {input.model} --out {output}"
        " 2>&1 | tee {log}"


rule adapter:
    input:
        model=f"work/{RUN}/model.json",
    output:
        directory(f"work/{RUN}/adapter"),
    log:
        f"{LOGS}/adapter.log",
    priority: FIRST
    container:
        image(STACKS[0])
    resources:
        config=CONFIG_PATH,
        gpu=0,
        stack=STACKS[0],
    params:
        adapter=CONFIG.adapter.model_dump_json(),
        code=CODE["adapter"],
    shell:
        "flexroll --stack {resources.stack} adapter --config {resources.config:q} --model {input.model} --out-dir {output}"
        " 2>&1 | tee {log}"


rule merge:
    input:
        model=f"work/{RUN}/model.json",
        adapter=f"work/{RUN}/adapter",
    output:
        directory(f"work/{RUN}/merged"),
    log:
        f"{LOGS}/merge.log",
    priority: FIRST
    container:
        image(STACKS[0])
    resources:
        config=CONFIG_PATH,
        gpu=0,
        stack=STACKS[0],
    params:
        code=CODE["merge"],
    shell:
        "flexroll --stack {resources.stack} merge --model {input.model} --adapter {input.adapter} --out-dir {output}"
        " 2>&1 | tee {log}"
