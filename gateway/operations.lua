-- Scale-ups, scale-downs and snapshots: decided and written in one step, so that concurrent callers share one operation.
--
-- KEYS  1 :replicas        hash    replica id -> Replica (read)
--       2 :jobs            zset    job id -> ms claimable from
--       3 :starts:{model}  hash    slot -> job id of each start not settled
--       4 :active:{model}  string  id of the model's running scale-up
--       5 :failure:{model} string  why it cannot be started for now (read)
--       6 :events          pubsub
-- ARGV  1 scale_up | scale_down | snapshot
--       2 JSON: model, operation (the id a new one gets), reason, target, replica, inflight (incarnation -> requests),
--         ttl_s of a settled operation, and the prefixes operation_key, job_key, host_jobs_key
-- Returns {verdict, operation as JSON or ""}; verdict: created | joined | refused (a failure stands) | missing (no such
-- replica is admitted).

local REPLICAS, JOBS, STARTS, ACTIVE, FAILURE, EVENTS = unpack(KEYS)
local args = cjson.decode(ARGV[2])
local TERMINAL = { stopped = true, failed = true, cancelled = true, quarantined = true }

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- cjson writes an empty table as {}; the tuple that may be empty must stay one.
local function encode(record)
  return (cjson.encode(record):gsub('"jobs":{}', '"jobs":[]'))
end

local function pairs_of(key)
  local flat, result = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do result[flat[i]] = flat[i + 1] end
  return result
end

local function slot_of(replica)
  return tonumber(replica:match('#(%d+)$'))
end

-- Records of this model that are not over, by slot.
local function records()
  local found = {}
  for id, text in pairs(pairs_of(REPLICAS)) do
    local record = cjson.decode(text)
    if record.model == args.model and not TERMINAL[record.state] then found[slot_of(id)] = record end
  end
  return found
end

-- The text of an operation that still runs, or nil.
local function running(id)
  local text = id and redis.call('GET', args.operation_key .. id)
  if text and cjson.decode(text).state == 'running' then return text end
  return nil
end

local function write_operation(kind, jobs)
  local operation = {
    id = args.operation, kind = kind, model = args.model, reason = args.reason, target = args.target, jobs = jobs,
    state = #jobs > 0 and 'running' or 'succeeded', created_ms = now_ms, updated_ms = now_ms,
  }
  local text = encode(operation)
  redis.call('SET', args.operation_key .. args.operation, text)
  if #jobs == 0 then redis.call('EXPIRE', args.operation_key .. args.operation, args.ttl_s) end
  return text
end

local function write_job(kind, id, queue, replica, incarnation)
  local job = {
    id = id, kind = kind, model = args.model, operation = args.operation, reason = args.reason,
    replica = replica, incarnation = incarnation,
  }
  redis.call('HSET', args.job_key .. id, 'record', cjson.encode(job), 'fence', 0, 'owner', '', 'attempts', 0)
  redis.call('ZADD', queue, now_ms, id)
end

-- After the operation and all its jobs are in place: who hears of a job finds everything.
local function announce(jobs)
  for _, id in ipairs(jobs) do
    redis.call('PUBLISH', EVENTS, cjson.encode({ job = id, model = args.model, operation = args.operation }))
  end
end

local function scale_up()
  local starts, taken, coming, live = pairs_of(STARTS), {}, 0, 0
  for slot in pairs(starts) do
    taken[tonumber(slot)] = true
    coming = coming + 1
  end
  for slot, record in pairs(records()) do
    -- A start whose record is admitted but which is not settled yet counts once.
    if record.state == 'admitted' and not taken[slot] then live = live + 1 end
    taken[slot] = true
  end
  local deficit = args.target - live - coming
  if deficit <= 0 then
    local active = running(redis.call('GET', ACTIVE) or nil)
    for _, job in pairs(starts) do active = active or running(job:match('^(.*)/')) end
    if active then return { 'joined', active } end
    return { 'created', write_operation('scale_up', {}) }
  end
  if args.reason ~= 'admin' and redis.call('EXISTS', FAILURE) == 1 then return { 'refused', '' } end
  local jobs, slot = {}, 0
  while #jobs < deficit do
    if not taken[slot] then
      local id = args.operation .. '/' .. slot
      write_job('start', id, JOBS, args.model .. '#' .. slot, '')
      redis.call('HSET', STARTS, slot, id)
      jobs[#jobs + 1] = id
    end
    slot = slot + 1
  end
  local text = write_operation('scale_up', jobs)
  redis.call('SET', ACTIVE, args.operation)
  announce(jobs)
  return { 'created', text }
end

-- Unsettled jobs of one kind and this model in a queue.
local function queued(queue, kind)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
    local text = redis.call('HGET', args.job_key .. id, 'record')
    local job = text and cjson.decode(text)
    if job and job.kind == kind and job.model == args.model then found[#found + 1] = job end
  end
  return found
end

local function scale_down()
  local alive, stopping, hosts = records(), {}, {}
  for _, record in pairs(alive) do hosts[record.host] = true end
  for host in pairs(hosts) do
    for _, job in ipairs(queued(args.host_jobs_key .. host, 'stop')) do stopping[job.incarnation] = running(job.operation) end
  end
  local candidates, joined = {}, nil
  for slot, record in pairs(alive) do
    local chosen = args.replica == '' or args.replica == record.id
    if chosen and stopping[record.incarnation] then
      joined = stopping[record.incarnation]
    elseif chosen and record.state == 'admitted' then
      candidates[#candidates + 1] = { slot = slot, record = record, load = args.inflight[record.incarnation] or 0 }
    end
  end
  local excess = #candidates - (args.replica == '' and args.target or 0)
  if excess <= 0 then
    if joined then return { 'joined', joined } end
    if args.replica ~= '' then return { 'missing', '' } end
    return { 'created', write_operation('scale_down', {}) }
  end
  table.sort(candidates, function(a, b)
    if a.load ~= b.load then return a.load < b.load end
    return a.slot > b.slot
  end)
  local jobs = {}
  for i = 1, excess do
    local record = candidates[i].record
    local id = args.operation .. '/' .. candidates[i].slot
    write_job('stop', id, args.host_jobs_key .. record.host, record.id, record.incarnation)
    jobs[i] = id
  end
  local text = write_operation('scale_down', jobs)
  announce(jobs)
  return { 'created', text }
end

local function snapshot()
  for _, job in ipairs(queued(JOBS, 'snapshot')) do
    local text = running(job.operation)
    if text then return { 'joined', text } end
  end
  local id = args.operation .. '/0'
  write_job('snapshot', id, JOBS, '', '')
  local text = write_operation('snapshot', { id })
  announce({ id })
  return { 'created', text }
end

local commands = { scale_up = scale_up, scale_down = scale_down, snapshot = snapshot }
return commands[ARGV[1]]()
