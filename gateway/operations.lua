-- Scale-ups, scale-downs, moves and snapshots: decided and written in one step, so that concurrent callers share one operation.
--
-- A model in a group needs a place in it: no more than group.members models have one at once. Who has a place is read off
-- the records, starts and snapshots each time, so that none is ever lost; who waits for one is written down, in order, and
-- places that become free go to the first in the queue and to nobody else.
--
-- KEYS  1 :replicas        hash    replica id -> Replica (read)
--       2 :jobs            zset    job id -> ms claimable from
--       3 :starts:{model}  hash    slot -> job id of each start not settled
--       4 :active:{model}  string  id of the model's running scale-up
--       5 :failure:{model} string  why it cannot be started for now (read)
--       6 :events          pubsub
--       7 :group:{name}    hash    model -> Waiting
--       8 :preloaded       set     models
-- ARGV  1 scale_up | preload | displace | scale_down | move | snapshot
--       2 JSON: model, operation (the id a new one gets), reason, target, replica, inflight (incarnation -> requests),
--         trace, ttl_s of a settled operation, the prefixes operation_key, job_key, host_jobs_key, host_key, starts_key,
--         tenure_key, and
--         group (absent: in none): members, models, pinned, ttl_ms;   scale_up: yields
--         move: to (the host that shall have it);   displace: model (who has to go), asker (who waits), min_tenure_ms, detail
-- Returns {verdict, operation as JSON or ""}; verdict: created | joined | refused (a failure stands) | missing (no such
-- replica is admitted; it was preloaded before; nobody has to go) | crowded (no place; with who has one and who waits).

local REPLICAS, JOBS, STARTS, ACTIVE, FAILURE, EVENTS, GROUP, PRELOADED = unpack(KEYS)
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
    trace = args.trace,
    state = #jobs > 0 and 'running' or 'succeeded', created_ms = now_ms, updated_ms = now_ms,
  }
  local text = encode(operation)
  redis.call('SET', args.operation_key .. args.operation, text)
  if #jobs == 0 then redis.call('EXPIRE', args.operation_key .. args.operation, args.ttl_s) end
  return text
end

local function write_job(kind, id, queue, replica, incarnation, replaces)
  local job = {
    id = id, kind = kind, model = args.model, operation = args.operation, reason = args.reason,
    replica = replica, incarnation = incarnation, detail = args.detail or '', trace = args.trace,
    replaces = replaces,
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

-- Unsettled jobs of one kind in a queue: of this model, or of any in `models`.
local function queued(queue, kind, models)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
    local text = redis.call('HGET', args.job_key .. id, 'record')
    local job = text and cjson.decode(text)
    if job and job.kind == kind and (models or { [args.model] = true })[job.model] then found[#found + 1] = job end
  end
  return found
end

-- incarnation -> operation, of each stop that is not settled.
local function stops(alive, models)
  local hosts, found = {}, {}
  for _, record in pairs(alive) do hosts[record.host] = true end
  for host in pairs(hosts) do
    for _, job in ipairs(queued(args.host_jobs_key .. host, 'stop', models)) do found[job.incarnation] = running(job.operation) end
  end
  return found
end

-- model -> {coming, live, ending} of each that has a place. It is `leaving` when all that is live of it is about to stop.
local function places()
  local models, found, alive = {}, {}, {}
  for _, model in ipairs(args.group.models) do
    models[model] = true
    local coming = redis.call('HLEN', args.starts_key .. model)
    if coming > 0 then found[model] = { coming = coming, live = 0, ending = 0 } end
  end
  for _, job in ipairs(queued(JOBS, 'snapshot', models)) do
    found[job.model] = found[job.model] or { coming = 0, live = 0, ending = 0 }
    found[job.model].coming = found[job.model].coming + 1
  end
  for id, text in pairs(pairs_of(REPLICAS)) do
    local record = cjson.decode(text)
    if models[record.model] and not TERMINAL[record.state] then alive[id] = record end
  end
  local stopping = stops(alive, models)
  for _, record in pairs(alive) do
    local place = found[record.model] or { coming = 0, live = 0, ending = 0 }
    found[record.model], place.live = place, place.live + 1
    if record.state == 'draining' or stopping[record.incarnation] then place.ending = place.ending + 1 end
  end
  for model, place in pairs(found) do
    place.leaving = place.coming == 0 and place.ending == place.live
    -- The restorer wrote it with the first admission; a store that forgot counts from now.
    if place.coming == 0 then redis.call('SET', args.tenure_key .. model, now_ms, 'NX') end
    place.since = tonumber(redis.call('GET', args.tenure_key .. model) or nil)
  end
  return found
end

-- Who waits for a place, the next one first; who is no longer asked for is forgotten.
local function queue()
  local found = {}
  for model, text in pairs(pairs_of(GROUP)) do
    local waiting = cjson.decode(text)
    if now_ms - waiting.seen_ms > args.group.ttl_ms then
      redis.call('HDEL', GROUP, model)
    else
      waiting.model = model
      found[#found + 1] = waiting
    end
  end
  table.sort(found, function(a, b)
    if a.yields ~= b.yields then return b.yields end
    if a.since_ms ~= b.since_ms then return a.since_ms < b.since_ms end
    return a.model < b.model
  end)
  return found
end

-- Free places for `model`, counting the one that it has itself, and how many more are being freed.
local function room(model, there)
  local taken, leaving = 0, 0
  for other, place in pairs(there) do
    if other ~= model then
      taken = taken + 1
      if place.leaving then leaving = leaving + 1 end
    end
  end
  return args.group.members - taken, leaving
end

local function rank(model, waiting)
  for n, one in ipairs(waiting) do
    if one.model == model then return n end
  end
  return nil
end

local function crowded(there, waiting)
  local answer = { members = {}, waiting = {} }
  for model, place in pairs(there) do
    local since = place.coming == 0 and place.since or nil
    answer.members[#answer.members + 1] = { model = model, leaving = place.leaving, serving_ms = since and now_ms - since }
  end
  for n, one in ipairs(waiting) do
    answer.waiting[n] = { model = one.model, yields = one.yields, waited_ms = now_ms - one.since_ms }
  end
  return { 'crowded', cjson.encode(answer) }
end

-- Ask for a place. Demand of one gateway is not weakened by another that only wants to keep the model warm.
local function line_up()
  local text = redis.call('HGET', GROUP, args.model)
  local known = text and cjson.decode(text)
  if known and now_ms - known.seen_ms > args.group.ttl_ms then known = nil end
  if known and args.yields and not known.yields then return end
  local since = known and known.yields == args.yields and known.since_ms or now_ms
  redis.call('HSET', GROUP, args.model, cjson.encode({ since_ms = since, seen_ms = now_ms, yields = args.yields }))
end

-- May this model start something? Returns nil if so, else the answer to give.
local function refused_place()
  if not args.group then return nil end
  local there = places()
  local mine = there[args.model]
  if mine and not mine.leaving then
    redis.call('HDEL', GROUP, args.model)
    local waiting = queue()
    -- While others wait nobody takes more than it has: what is on its way could not be displaced.
    if #waiting > 0 and not args.group.pinned and args.reason ~= 'admin' then return crowded(there, waiting) end
    return nil
  end
  -- An operator asks once and does not queue up.
  local queues = args.reason ~= 'admin' and args.reason ~= 'preload'
  if queues then line_up() end
  local waiting = queue()
  if (rank(args.model, waiting) or #waiting + 1) > room(args.model, there) then return crowded(there, waiting) end
  redis.call('HDEL', GROUP, args.model)
  redis.call('DEL', args.tenure_key .. args.model)
  return nil
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
  if args.reason ~= 'admin' and redis.call('EXISTS', FAILURE) == 1 then
    redis.call('HDEL', GROUP, args.model)
    return { 'refused', '' }
  end
  local refused = refused_place()
  if refused then return refused end
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

-- Once in the life of an installation, whatever becomes of it.
local function preload()
  if redis.call('SISMEMBER', PRELOADED, args.model) == 1 then return { 'missing', '' } end
  local answer = scale_up()
  if answer[1] ~= 'refused' then redis.call('SADD', PRELOADED, args.model) end
  return answer
end

-- Start one on the host `to`, and leave it to the end of that start to have the old one stopped. The slot is a free one.
local function move()
  local alive, taken = records(), pairs_of(STARTS)
  local record = alive[slot_of(args.replica)]
  if not record or record.state ~= 'admitted' or stops(alive)[record.incarnation] then return { 'missing', '' } end
  for _, id in pairs(taken) do
    local job = cjson.decode(redis.call('HGET', args.job_key .. id, 'record') or '{}')
    local old = job.replaces
    if old and old ~= cjson.null and old.incarnation == record.incarnation then
      return { 'joined', running(job.operation) or '' }
    end
  end
  local slot = 0
  while alive[slot] or taken[tostring(slot)] do slot = slot + 1 end
  local id = args.operation .. '/' .. slot
  local replaces = { replica = record.id, incarnation = record.incarnation, host = record.host }
  write_job('start', id, args.host_jobs_key .. args.to, args.model .. '#' .. slot, '', replaces)
  redis.call('HSET', STARTS, slot, id)
  local text = write_operation('move', { id })
  announce({ id })
  return { 'created', text }
end

-- The first to go: what nobody may reach any more, then the idlest, then where there are most, so that hosts share what stays.
local function scale_down()
  local alive = records()
  local crowd = {}
  for _, record in pairs(alive) do crowd[record.host] = (crowd[record.host] or 0) + 1 end
  local stopping, candidates, joined = stops(alive), {}, nil
  for slot, record in pairs(alive) do
    local chosen = args.replica == '' or args.replica == record.id
    if chosen and stopping[record.incarnation] then
      joined = stopping[record.incarnation]
    elseif chosen and record.state == 'admitted' then
      candidates[#candidates + 1] = {
        slot = slot, record = record, load = args.inflight[record.incarnation] or 0, crowd = crowd[record.host],
        reports = redis.call('EXISTS', args.host_key .. record.host),
      }
    end
  end
  local excess = #candidates - (args.replica == '' and args.target or 0)
  if excess <= 0 then
    if joined then return { 'joined', joined } end
    if args.replica ~= '' then return { 'missing', '' } end
    return { 'created', write_operation('scale_down', {}) }
  end
  table.sort(candidates, function(a, b)
    if a.reports ~= b.reports then return a.reports < b.reports end
    if a.load ~= b.load then return a.load < b.load end
    if a.crowd ~= b.crowd then return a.crowd > b.crowd end
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

-- Judged by a gateway a moment ago; done only if it is still right.
local function displace()
  local there, waiting = places(), queue()
  local place, n = there[args.model], rank(args.asker, waiting)
  if not n or not place or place.leaving or place.coming > 0 or now_ms - place.since < args.min_tenure_ms then
    return { 'missing', '' }
  end
  local free, leaving = room(args.asker, there)
  if n <= free + leaving then return { 'missing', '' } end
  return scale_down()
end

local function snapshot()
  for _, job in ipairs(queued(JOBS, 'snapshot')) do
    local text = running(job.operation)
    if text then return { 'joined', text } end
  end
  local refused = refused_place()
  if refused then return refused end
  local id = args.operation .. '/0'
  write_job('snapshot', id, JOBS, '', '')
  local text = write_operation('snapshot', { id })
  announce({ id })
  return { 'created', text }
end

local commands = {
  scale_up = scale_up, preload = preload, displace = displace, scale_down = scale_down, move = move, snapshot = snapshot,
}
return commands[ARGV[1]]()
