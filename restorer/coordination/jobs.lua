-- The restorer's writes to the shared store: each is one step, and each is refused to who no longer holds the right.
--
-- KEYS  1 :replicas  2 :seq  3 :fence  4 :events        ARGV  1 command  2 JSON arguments
--
-- claim   {queues, owner, ttl_ms, job_key, tally, takeovers, kinds [, ranking, shared, avoid_ms]}
--                                 -> {queue, record, fence, attempts, avoid}, the ms until one will be for this host, or nil
--         A claimed job stays in its queue, due again when the lease ends: a dead restorer's job claims itself back.
--         That is counted here, under takeovers[kind]: this one may die of the job, too, before it could report anything.
--         `ranking` says of each "kind model" which hosts may take one from the queue `shared`, the best first, and for how
--         long each leaves it to those before it. Hosts at which it failed are passed over, for avoid_ms.
-- renew   {queue, job_key, job, fence, ttl_ms}              -> 1, or 0 when the lease was lost
-- recover {queues, owner, job_key}                         -> 1          what this owner had claimed is due at once
-- release {queue, job_key, job, fence, delay_ms [, avoid]}  -> 1 | 0      due again after the delay, for anyone but `avoid`
-- write   {replica, record, fence [, job_key, job]}         -> seq, or 0 when a later fence has written or holds the job
-- park    {replica, record, fence, model, keep}             -> seq, 0, or -1: fewer than `keep` others are admitted, or it stops
-- settle  {queue, job_key, job, fence, operation_key, active_key, starts_key, state, detail, code, snapshot, ttl_s,
--          failure_key, failure, failure_ms, tenure_key, host_jobs_key [, replica, record, stages_key, stages, samples]}
--                                                            -> 1 | 0
--         Ends a job, moves its operation on, and writes the replica's record in the same step, so that ADMITTED and
--         "the start is over" are never seen apart. `stages` ({field, seconds} each) join the latest `samples` of their kind.
--         A start that replaces a replica, and went well, leaves the stop of that one to its host, in the same operation.
-- bury    {host, host_key, gateways_key, gateway_key, queue, job_key, operation_key, active_key, starts_key, ttl_s, detail,
--          records: replica -> {model, incarnation, fence, record}}                  -> the replicas that were buried
--         Of a host that does not report. A replica is given up if no gateway that lives can connect to it; and what lay in
--         the host's own queue ends with it. Whoever comes back finds a later fence.

local REPLICAS, SEQ, FENCE, EVENTS = unpack(KEYS)
local a = cjson.decode(ARGV[2])
local RUNNING = { admitted = true, draining = true }

local function now_ms()
  local clock = redis.call('TIME')
  return clock[1] * 1000 + math.floor(clock[2] / 1000)
end

local function holds()
  return a.job == nil or tonumber(redis.call('HGET', a.job_key .. a.job, 'fence') or -1) == a.fence
end

local function write_record()
  local known = redis.call('HGET', REPLICAS, a.replica)
  if known and cjson.decode(known).fence > a.fence then return 0 end
  -- A store that lost its memory counts from 1 again; later claims must still outrank what survived it.
  if a.fence > tonumber(redis.call('GET', FENCE) or 0) then redis.call('SET', FENCE, a.fence) end
  local seq = redis.call('INCR', SEQ)
  -- Not decoded and encoded again: cjson would turn empty tuples into objects.
  local text = a.record:gsub('"seq":0', '"seq":' .. seq, 1)
  redis.call('HSET', REPLICAS, a.replica, text)
  redis.call('PUBLISH', EVENTS, '{"replica":' .. text .. '}')
  return seq
end

-- Its place in the order of those that may take a job, as ms that it has to have been due; nil: it may not.
local function lag_ms(job, key)
  local ranks = a.ranking[job.kind .. ' ' .. job.model]
  -- One that has just come: whoever asks next knows of it.
  if not ranks then return nil end
  local avoided = cjson.decode(redis.call('HGET', key, 'avoid') or '{}')
  local mine, first
  for n, rank in ipairs(ranks) do
    if rank[1] == a.owner then mine = rank[2] end
    -- Nobody waits for one that leaves it alone.
    if not first and not avoided[rank[1]] then first = n > 1 and rank[2] or 0 end
  end
  if not mine then return nil end
  if first and avoided[a.owner] then return math.max(mine, a.avoid_ms) end
  return math.max(0, mine - (first or 0))
end

local function take(queue, key, id, record)
  local fence, before = redis.call('INCR', FENCE), redis.call('HGET', key, 'owner')
  redis.call('HSET', key, 'fence', fence, 'owner', a.owner)
  redis.call('ZADD', queue, now_ms() + a.ttl_ms, id)
  if before and before ~= '' then
    redis.call('HINCRBYFLOAT', a.tally, a.takeovers[cjson.decode(record).kind], 1)
  end
  local avoid = redis.call('HGET', key, 'avoid') or '{}'
  return { queue, record, fence, redis.call('HINCRBY', key, 'attempts', 1), avoid }
end

local function claim()
  local now, later = now_ms(), nil
  for _, queue in ipairs(a.queues) do
    local due = redis.call('ZRANGEBYSCORE', queue, '-inf', now, 'WITHSCORES')
    for i = 1, #due, 2 do
      local id, key, wait = due[i], a.job_key .. due[i], 0
      local record = redis.call('HGET', key, 'record')
      if not record then
        redis.call('ZREM', queue, id)
      else
        local job = cjson.decode(record)
        if a.kinds and not a.kinds[job.kind] then
          wait = nil
        elseif a.ranking and queue == a.shared then
          local lag = lag_ms(job, key)
          wait = lag and math.max(0, tonumber(due[i + 1]) + lag - now)
        end
        if wait == 0 then return take(queue, key, id, record) end
        if wait then later = math.min(later or wait, wait) end
      end
    end
  end
  return later and math.ceil(later)
end

local function move(delay_ms)
  if not holds() then return 0 end
  redis.call('ZADD', a.queue, now_ms() + delay_ms, a.job)
  return 1
end

-- Given back: whoever has it next did not take it from anybody.
local function release()
  if move(a.delay_ms) == 0 then return 0 end
  redis.call('HSET', a.job_key .. a.job, 'owner', '')
  if a.avoid then
    local avoided = cjson.decode(redis.call('HGET', a.job_key .. a.job, 'avoid') or '{}')
    avoided[a.avoid] = true
    redis.call('HSET', a.job_key .. a.job, 'avoid', cjson.encode(avoided))
  end
  return 1
end

local function write()
  if not holds() then return 0 end
  return write_record()
end

-- Two hosts that have been idle for as long must not both go below what is to be kept, so the count is taken here.
local function park()
  local known, others = redis.call('HGET', REPLICAS, a.replica), 0
  local record = known and cjson.decode(known)
  if record and record.fence <= a.fence and record.state ~= 'admitted' then return -1 end
  for _, text in ipairs(redis.call('HVALS', REPLICAS)) do
    local record = cjson.decode(text)
    if record.model == a.model and record.state == 'admitted' and record.id ~= a.replica then others = others + 1 end
  end
  if others < a.keep then return -1 end
  return write_record()
end

-- `ended`: {job, state, detail, code, snapshot}; `more`: a job that the operation goes on with.
local function settle_operation(id, ended, more)
  local text = redis.call('GET', a.operation_key .. id)
  if not text then return end
  local operation = cjson.decode(text)
  local left = { more }
  for _, job in ipairs(operation.jobs) do
    if job ~= ended.job then left[#left + 1] = job end
  end
  operation.jobs, operation.updated_ms = left, now_ms()
  if ended.snapshot ~= '' then operation.snapshot = ended.snapshot end
  -- One failed start fails the operation, whatever the others do; a success does not undo it.
  if ended.state ~= 'succeeded' and operation.state == 'running' then
    operation.outcome, operation.detail, operation.code = ended.state, ended.detail, ended.code
  end
  if #left == 0 then
    operation.state = operation.outcome or 'succeeded'
    operation.outcome = nil
  end
  redis.call('SET', a.operation_key .. id, (cjson.encode(operation):gsub('"jobs":{}', '"jobs":[]')))
  if #left == 0 then
    redis.call('EXPIRE', a.operation_key .. id, a.ttl_s)
    local active_key = a.active_key .. operation.model
    if redis.call('GET', active_key) == id then redis.call('DEL', active_key) end
  end
end

-- Lists are short (samples) and written once a start, so that readers get each with one look.
local function remember_stages()
  for _, stage in ipairs(a.stages or {}) do
    local field, seconds = unpack(stage)
    local text = redis.call('HGET', a.stages_key, field)
    local list = text and cjson.decode(text) or {}
    list[#list + 1] = seconds
    while #list > a.samples do table.remove(list, 1) end
    redis.call('HSET', a.stages_key, field, cjson.encode(list))
  end
end

-- The job is over: it, and what pointed at it.
local function remove(queue, job)
  redis.call('ZREM', queue, job.id)
  redis.call('DEL', a.job_key .. job.id)
  local slot, starts_key = job.replica:match('#(%d+)$'), a.starts_key .. job.model
  if job.kind == 'start' and redis.call('HGET', starts_key, slot) == job.id then redis.call('HDEL', starts_key, slot) end
end

-- The old one goes when the new one serves; returns the job that sees to it, if there is something to replace.
local function replace(job)
  local old = job.replaces
  if a.state ~= 'succeeded' or not old or old == cjson.null then return nil end
  local id = job.operation .. '/' .. old.replica:match('#(%d+)$')
  local stop = {
    id = id, kind = 'stop', model = job.model, operation = job.operation, reason = job.reason, trace = job.trace,
    replica = old.replica, incarnation = old.incarnation, detail = 'moved to ' .. a.owner,
  }
  redis.call('HSET', a.job_key .. id, 'record', cjson.encode(stop), 'fence', 0, 'owner', '', 'attempts', 0)
  redis.call('ZADD', a.host_jobs_key .. old.host, now_ms(), id)
  return id
end

local function settle()
  if not holds() then return 0 end
  local job = cjson.decode(redis.call('HGET', a.job_key .. a.job, 'record'))
  if a.replica and write_record() == 0 then return 0 end
  remove(a.queue, job)
  local more = replace(job)
  settle_operation(job.operation, a, more)
  if more then redis.call('PUBLISH', EVENTS, cjson.encode({ job = more, model = job.model, operation = job.operation })) end
  if a.failure ~= '' then
    redis.call('SET', a.failure_key, a.failure, 'PX', a.failure_ms)
  elseif a.state == 'succeeded' and job.kind == 'start' then
    redis.call('DEL', a.failure_key)
    -- The first admission since the model was let in; operations.lua forgets it when the model is let in again.
    redis.call('SET', a.tenure_key, now_ms(), 'NX')
    remember_stages()
  end
  redis.call('PUBLISH', EVENTS, cjson.encode({ model = job.model, operation = job.operation }))
  return 1
end

local function recover()
  for _, queue in ipairs(a.queues) do
    for _, id in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
      if redis.call('HGET', a.job_key .. id, 'owner') == a.owner then redis.call('ZADD', queue, now_ms(), id) end
    end
  end
  return 1
end

-- No gateway that lives can connect to it. One that is alone cut off from a host must not end what the others use.
local function out_of_reach()
  local reports = {}
  for _, id in ipairs(redis.call('SMEMBERS', a.gateways_key)) do
    local text = redis.call('GET', a.gateway_key .. id)
    if text then reports[#reports + 1] = cjson.decode(text) end
  end
  return function(incarnation)
    for _, report in ipairs(reports) do
      if not report.knocked or report.knocked[incarnation] ~= false then return false end
    end
    return #reports > 0
  end
end

-- A start that the host had to itself, whose lease has ended with it.
local function stranded(one, replica)
  local id = redis.call('HGET', a.starts_key .. one.model, replica:match('#(%d+)$'))
  local due = id and redis.call('ZSCORE', a.queue, id)
  return due and tonumber(due) <= now_ms()
end

local function bury()
  if redis.call('EXISTS', a.host_key .. a.host) == 1 then return {} end
  local lost, buried = out_of_reach(), {}
  for replica, one in pairs(a.records) do
    local known = redis.call('HGET', REPLICAS, replica)
    local record = known and cjson.decode(known)
    if record and record.incarnation == one.incarnation and record.fence == one.fence then
      local runs = RUNNING[record.state]
      if (runs and lost(record.incarnation)) or (not runs and stranded(one, replica)) then
        a.replica, a.fence = replica, redis.call('INCR', FENCE)
        a.record = one.record:gsub('"fence":%d+', '"fence":' .. a.fence, 1)
        write_record()
        buried[#buried + 1] = replica
      end
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', a.queue, '-inf', now_ms())) do
    local text = redis.call('HGET', a.job_key .. id, 'record')
    local job = text and cjson.decode(text)
    local known = job and redis.call('HGET', REPLICAS, job.replica)
    local record = known and cjson.decode(known)
    if job and not (record and record.incarnation == job.incarnation and RUNNING[record.state]) then
      remove(a.queue, job)
      local state = job.kind == 'stop' and 'succeeded' or 'failed'
      settle_operation(job.operation, { job = id, state = state, detail = a.detail, code = 1, snapshot = '' })
      redis.call('PUBLISH', EVENTS, cjson.encode({ model = job.model, operation = job.operation }))
    end
  end
  return buried
end

local commands = {
  bury = bury,
  park = park,
  claim = claim,
  recover = recover,
  renew = function() return move(a.ttl_ms) end,
  release = release,
  write = write,
  settle = settle,
}
return commands[ARGV[1]]()
