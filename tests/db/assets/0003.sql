BEGIN TRANSACTION;
CREATE TABLE api_keys (
	id VARCHAR(20) NOT NULL, 
	name TEXT NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	scopes TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	revoked_at DOUBLE, 
	last_used_at DOUBLE, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id), 
	CONSTRAINT uq_api_keys_hash UNIQUE (hash)
);
INSERT INTO "api_keys" VALUES('82adccc1','ci','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','read tune',1795824513.52399,NULL,NULL);
CREATE TABLE audit (
	id INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	who TEXT NOT NULL, 
	action TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (id)
);
INSERT INTO "audit" VALUES(1,1.79582451354901504519e+09,'open','submit','job','');
CREATE TABLE devices (
	id VARCHAR(20) NOT NULL, 
	"key" VARCHAR(20) NOT NULL, 
	slug TEXT NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_devices PRIMARY KEY (id)
);
INSERT INTO "devices" VALUES('9f26827d3edaef98dd6a','a1d85b4528a92e2b04d7','h100','{"architecture":"sm_90","bandwidth_gbs":3352.0,"l2_bytes":52428800,"memory_bytes":85520809984,"multiprocessors":132,"name":"NVIDIA H100 80GB HBM3","peak_tflops":{"bf16":989.4,"fp32":66.9},"shared_memory_bytes":232448,"slug":"h100","vendor":"nvidia"}');
CREATE TABLE jobs (
	number INTEGER NOT NULL, 
	id VARCHAR(20) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	workload_key VARCHAR(20) NOT NULL, 
	device TEXT NOT NULL, 
	strategy TEXT NOT NULL, 
	trials BIGINT, 
	seconds DOUBLE, 
	seed BIGINT NOT NULL, 
	worker TEXT, 
	attempts INTEGER NOT NULL, 
	heartbeat_at DOUBLE, 
	created_at DOUBLE NOT NULL, 
	updated_at DOUBLE NOT NULL, 
	message TEXT NOT NULL, 
	record_id VARCHAR(20), 
	done BIGINT NOT NULL, 
	total BIGINT, idempotency_key TEXT, 
	CONSTRAINT pk_jobs PRIMARY KEY (number), 
	CONSTRAINT uq_jobs_id UNIQUE (id), 
	CONSTRAINT fk_jobs_workload_key FOREIGN KEY(workload_key) REFERENCES workloads ("key")
);
INSERT INTO "jobs" VALUES(1,'4b02b848d6749816803e','queued','78e35ce963c146826e0c','replay:h100','model',24,NULL,0,NULL,0,NULL,1.79582451344300055504e+09,1.79582451344300055504e+09,'',NULL,0,24,'first');
CREATE TABLE kernelwright_schema (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT kernelwright_schema_pkc PRIMARY KEY (version_num)
);
INSERT INTO "kernelwright_schema" VALUES('0003');
CREATE TABLE pieces (
	"key" VARCHAR(20) NOT NULL, 
	device_key VARCHAR(20) NOT NULL, 
	toolchain_key VARCHAR(20) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_pieces PRIMARY KEY ("key", device_key, toolchain_key)
);
INSERT INTO "pieces" VALUES('pppppppppppppppppppp','dddddddddddddddddddd','tttttttttttttttttttt',1.79588364310099482534e+09,'{"device_key":"dddddddddddddddddddd","failures":{"bbbbbbbbbbbbbbbbbbbb":"wrong"},"noise":0.01,"ours_us":{"aaaaaaaaaaaaaaaaaaaa":11.0},"piece":"pppppppppppppppppppp","text":"mm[8, 8]+silu","theirs_us":12.5,"toolchain_key":"tttttttttttttttttttt"}');
CREATE TABLE records (
	id INTEGER NOT NULL, 
	"key" VARCHAR(20) NOT NULL, 
	workload_key VARCHAR(20) NOT NULL, 
	device_id VARCHAR(20) NOT NULL, 
	device_key VARCHAR(20) NOT NULL, 
	toolchain_key VARCHAR(20) NOT NULL, 
	operator TEXT NOT NULL, 
	family VARCHAR(20) NOT NULL, 
	created DOUBLE NOT NULL, 
	body TEXT NOT NULL, place BIGINT DEFAULT '0' NOT NULL, template TEXT DEFAULT '' NOT NULL, template_fingerprint TEXT DEFAULT '' NOT NULL, trust TEXT DEFAULT 'measured' NOT NULL, source TEXT DEFAULT '' NOT NULL, reason TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_records PRIMARY KEY (id), 
	CONSTRAINT uq_records_key UNIQUE ("key"), 
	CONSTRAINT fk_records_workload_key FOREIGN KEY(workload_key) REFERENCES workloads ("key"), 
	CONSTRAINT fk_records_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_records_toolchain_key FOREIGN KEY(toolchain_key) REFERENCES toolchains ("key")
);
INSERT INTO "records" VALUES(1,'f00eb37aceb30bffe27a','78e35ce963c146826e0c','9f26827d3edaef98dd6a','a1d85b4528a92e2b04d7','9a5cc04bd379bc2bcbc5','matmul','d9297bc0a06041348792',1767323045.0,'{"created_at":"2026-01-02T03:04:05+00:00","measurement":{"median_us":9.0,"status":"ok"},"origin":"tune","schedule":{"knobs":{"block_m":64},"template":"pointer"},"template_fingerprint":"ffffffffffffffffffff","trials":24,"vendor":"torch.mm","vendor_us":10.0}',792723456,'pointer','ffffffffffffffffffff','measured','','');
CREATE TABLE toolchains (
	"key" VARCHAR(20) NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_toolchains PRIMARY KEY ("key")
);
INSERT INTO "toolchains" VALUES('9a5cc04bd379bc2bcbc5','{"compiler":"ptxas 12.8.93","driver":"580.82","timer":1,"torch":"2.13.0","triton":"3.7.1"}');
CREATE TABLE trials (
	id INTEGER NOT NULL, 
	"key" VARCHAR(20) NOT NULL, 
	workload_key VARCHAR(20) NOT NULL, 
	device_id VARCHAR(20) NOT NULL, 
	device_key VARCHAR(20) NOT NULL, 
	toolchain_key VARCHAR(20) NOT NULL, 
	operator TEXT NOT NULL, 
	status VARCHAR(32) NOT NULL, 
	median_us DOUBLE, 
	schedule TEXT NOT NULL, 
	measurement TEXT NOT NULL, 
	origin TEXT NOT NULL, 
	template_fingerprint TEXT NOT NULL, 
	measured_at TEXT NOT NULL, 
	job_id VARCHAR(20), error DOUBLE, trust TEXT DEFAULT 'measured' NOT NULL, source TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_trials PRIMARY KEY (id), 
	CONSTRAINT uq_trials_key UNIQUE ("key"), 
	CONSTRAINT fk_trials_workload_key FOREIGN KEY(workload_key) REFERENCES workloads ("key"), 
	CONSTRAINT fk_trials_device_id FOREIGN KEY(device_id) REFERENCES devices (id), 
	CONSTRAINT fk_trials_toolchain_key FOREIGN KEY(toolchain_key) REFERENCES toolchains ("key"), 
	CONSTRAINT fk_trials_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "trials" VALUES(1,'5974781a79774a236ffb','78e35ce963c146826e0c','9f26827d3edaef98dd6a','a1d85b4528a92e2b04d7','9a5cc04bd379bc2bcbc5','matmul','ok',11.0,'{"knobs":{"block_m":1,"precision":"bf16"},"template":"pointer"}','{"error":0.001,"median_us":11.0,"samples_us":[10.0,10.5],"status":"ok"}','tune','ffffffffffffffffffff','2026-01-02T03:04:05+00:00',NULL,0.001,'measured','');
INSERT INTO "trials" VALUES(2,'97258c62f386a8c4141e','78e35ce963c146826e0c','9f26827d3edaef98dd6a','a1d85b4528a92e2b04d7','9a5cc04bd379bc2bcbc5','matmul','ok',12.0,'{"knobs":{"block_m":2,"precision":"bf16"},"template":"pointer"}','{"error":0.001,"median_us":12.0,"samples_us":[10.0,10.5],"status":"ok"}','tune','ffffffffffffffffffff','2026-01-02T03:04:05+00:00',NULL,0.001,'measured','');
CREATE TABLE uses (
	record_key VARCHAR(20) NOT NULL, 
	count BIGINT NOT NULL, 
	last_used DOUBLE NOT NULL, 
	CONSTRAINT pk_uses PRIMARY KEY (record_key)
);
INSERT INTO "uses" VALUES('f00eb37aceb30bffe27a',3,1.79582451357299375527e+09);
CREATE TABLE workloads (
	"key" VARCHAR(20) NOT NULL, 
	operator TEXT NOT NULL, 
	dims TEXT NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_workloads PRIMARY KEY ("key")
);
INSERT INTO "workloads" VALUES('78e35ce963c146826e0c','matmul','{"K":4096,"M":64,"N":4096}','{"dims":{"K":4096,"M":64,"N":4096},"dtypes":{"a":"bf16","b":"bf16","out":"bf16"},"layouts":{"a":"row","b":"col","out":"row"},"operator":"matmul"}');
CREATE INDEX ix_devices_key ON devices ("key");
CREATE INDEX ix_jobs_state_number ON jobs (state, number);
CREATE INDEX ix_trials_place ON trials (workload_key, device_key, toolchain_key, status, median_us);
CREATE INDEX ix_records_place ON records (workload_key, device_key, created);
CREATE INDEX ix_records_operator ON records (operator, device_key, created);
CREATE INDEX ix_records_created ON records (created);
CREATE UNIQUE INDEX ix_jobs_idempotency_key ON jobs (idempotency_key);
CREATE INDEX ix_trials_operator ON trials (operator, device_key, id);
CREATE INDEX ix_trials_job ON trials (job_id, id);
CREATE INDEX ix_records_near ON records (family, device_key, place);
CREATE INDEX ix_pieces_device_key ON pieces (device_key, toolchain_key);
COMMIT;
