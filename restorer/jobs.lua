-- The restorer's writes to the shared store: each is one step, and each is refused to who no longer holds the right.
--
-- KEYS  1 :replicas  2 :seq  3 :fence  4 :events        ARGV  1 command  2 JSON arguments
--
-- claim   {queues, owner, ttl_ms, job_key, tally, takeovers} -> {queue, record, fence, attempts} or nil
--         A claimed job stays in its queue, due again when the lease ends: a dead restorer's job claims itself back.
--         That is counted here, under takeovers[kind]: this one may die of the job, too, before it could report anything.
-- renew   {queue, job_key, job, fence, ttl_ms}              -> 1, or 0 when the lease was lost
-- recover {queues, owner, job_key}                         -> 1          what this owner had claimed is due at once
-- release {queue, job_key, job, fence, delay_ms}            -> 1 | 0      due again after the delay, for anyone
-- write   {replica, record, fence [, job_key, job]}         -> seq, or 0 when a later fence has written or holds the job
-- settle  {queue, job_key, job, fence, operation_key, active_key, starts_key, slot, state, detail, code, snapshot,
--          ttl_s, failure_key, failure, failure_ms, tenure_key [, replica, record, stages_key, stages, samples]}  -> 1 | 0
--         Ends a job, moves its operation on, and writes the replica's record in the same step, so that ADMITTED and
--         "the start is over" are never seen apart. `stages` ({field, seconds} each) join the latest `samples` of their kind.

local REPLICAS, SEQ, FENCE, EVENTS = unpack(KEYS)
local a = cjson.decode(ARGV[2])

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

local function claim()
  for _, queue in ipairs(a.queues) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', queue, '-inf', now_ms(), 'LIMIT', 0, 20)) do
      local key = a.job_key .. id
      local record = redis.call('HGET', key, 'record')
      if record then
        local fence, before = redis.call('INCR', FENCE), redis.call('HGET', key, 'owner')
        redis.call('HSET', key, 'fence', fence, 'owner', a.owner)
        redis.call('ZADD', queue, now_ms() + a.ttl_ms, id)
        if before and before ~= '' then
          redis.call('HINCRBYFLOAT', a.tally, a.takeovers[cjson.decode(record).kind], 1)
        end
        return { queue, record, fence, redis.call('HINCRBY', key, 'attempts', 1) }
      end
      redis.call('ZREM', queue, id)
    end
  end
  return nil
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
  return 1
end

local function write()
  if not holds() then return 0 end
  return write_record()
end

local function settle_operation(id)
  local text = redis.call('GET', a.operation_key .. id)
  if not text then return end
  local operation = cjson.decode(text)
  local left = {}
  for _, job in ipairs(operation.jobs) do
    if job ~= a.job then left[#left + 1] = job end
  end
  operation.jobs, operation.updated_ms = left, now_ms()
  if a.snapshot ~= '' then operation.snapshot = a.snapshot end
  -- One failed start fails the operation, whatever the others do; a success does not undo it.
  if a.state ~= 'succeeded' and operation.state == 'running' then
    operation.outcome, operation.detail, operation.code = a.state, a.detail, a.code
  end
  if #left == 0 then
    operation.state = operation.outcome or 'succeeded'
    operation.outcome = nil
  end
  redis.call('SET', a.operation_key .. id, (cjson.encode(operation):gsub('"jobs":{}', '"jobs":[]')))
  if #left == 0 then
    redis.call('EXPIRE', a.operation_key .. id, a.ttl_s)
    if redis.call('GET', a.active_key) == id then redis.call('DEL', a.active_key) end
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

local function settle()
  if not holds() then return 0 end
  local job = cjson.decode(redis.call('HGET', a.job_key .. a.job, 'record'))
  if a.replica and write_record() == 0 then return 0 end
  redis.call('ZREM', a.queue, a.job)
  redis.call('DEL', a.job_key .. a.job)
  if a.slot ~= '' and redis.call('HGET', a.starts_key, a.slot) == a.job then redis.call('HDEL', a.starts_key, a.slot) end
  settle_operation(job.operation)
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

local commands = {
  claim = claim,
  recover = recover,
  renew = function() return move(a.ttl_ms) end,
  release = release,
  write = write,
  settle = settle,
}
return commands[ARGV[1]]()
