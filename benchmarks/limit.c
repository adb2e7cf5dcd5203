// The limit of W1: a consumer of librdkafka that counts records, and does nothing else.
// benchmarks/raw_consumer_limit.py compiles it, and loads it beside the librdkafka of confluent-kafka's wheel.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

enum { CONSUMER = 1, NO_ERROR = 0, PARTITION_EOF = -191, BATCH = 10000, CONNECT_MS = 30000, WAIT_MS = 1000 };

typedef struct {  // rd_kafka_message_t
    int err;
    void *topic;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *private;
} message;

typedef struct {
    void *kafka, *partitions, *queue;
    int partitions_count;
    int (*assign)(void *, void *);
    ssize_t (*consume)(void *, int, message **, size_t);
    void (*destroy_message)(message *), (*destroy_list)(void *), (*destroy_queue)(void *), (*destroy)(void *);
} limit;

// Connects, and reads nothing yet. settings: name, value, name, value, ..., NULL. Returns NULL on failure, with the reason in error.
limit *limit_open(const char *librdkafka, const char **settings, const char *topic, const int32_t *partitions, int count,
                  char *error, size_t error_size) {
    void *library = dlopen(librdkafka, RTLD_NOW);
    if (library == NULL) {
        snprintf(error, error_size, "%s", dlerror());
        return NULL;
    }
    void *(*conf_new)(void) = (void *(*)(void))dlsym(library, "rd_kafka_conf_new");
    int (*conf_set)(void *, const char *, const char *, char *, size_t) =
        (int (*)(void *, const char *, const char *, char *, size_t))dlsym(library, "rd_kafka_conf_set");
    void *(*kafka_new)(int, void *, char *, size_t) = (void *(*)(int, void *, char *, size_t))dlsym(library, "rd_kafka_new");
    void *(*list_new)(int) = (void *(*)(int))dlsym(library, "rd_kafka_topic_partition_list_new");
    void *(*list_add)(void *, const char *, int32_t) =
        (void *(*)(void *, const char *, int32_t))dlsym(library, "rd_kafka_topic_partition_list_add");
    int (*set_offset)(void *, const char *, int32_t, int64_t) =
        (int (*)(void *, const char *, int32_t, int64_t))dlsym(library, "rd_kafka_topic_partition_list_set_offset");
    int (*metadata)(void *, int, void *, const void **, int) =
        (int (*)(void *, int, void *, const void **, int))dlsym(library, "rd_kafka_metadata");
    void (*metadata_destroy)(const void *) = (void (*)(const void *))dlsym(library, "rd_kafka_metadata_destroy");
    void *(*queue)(void *) = (void *(*)(void *))dlsym(library, "rd_kafka_queue_get_consumer");

    void *conf = conf_new();
    for (const char **each = settings; *each != NULL; each += 2)
        if (conf_set(conf, each[0], each[1], error, error_size) != 0) return NULL;
    void *kafka = kafka_new(CONSUMER, conf, error, error_size);
    if (kafka == NULL) return NULL;
    const void *found = NULL;
    if (metadata(kafka, 1, NULL, &found, CONNECT_MS) != NO_ERROR) {
        snprintf(error, error_size, "no broker answers");
        return NULL;
    }
    metadata_destroy(found);

    limit *made = calloc(1, sizeof(limit));
    if (made == NULL) abort();
    made->kafka = kafka;
    made->queue = queue(kafka);
    made->partitions = list_new(count);
    made->partitions_count = count;
    for (int i = 0; i < count; i++) {
        list_add(made->partitions, topic, partitions[i]);
        set_offset(made->partitions, topic, partitions[i], 0);
    }
    made->assign = (int (*)(void *, void *))dlsym(library, "rd_kafka_assign");
    made->consume = (ssize_t(*)(void *, int, message **, size_t))dlsym(library, "rd_kafka_consume_batch_queue");
    made->destroy_message = (void (*)(message *))dlsym(library, "rd_kafka_message_destroy");
    made->destroy_list = (void (*)(void *))dlsym(library, "rd_kafka_topic_partition_list_destroy");
    made->destroy_queue = (void (*)(void *))dlsym(library, "rd_kafka_queue_destroy");
    made->destroy = (void (*)(void *))dlsym(library, "rd_kafka_destroy");
    return made;
}

// Reads every partition to its end, closes the consumer, and returns the number of records; or an error of librdkafka, below 0.
int64_t limit_count(limit *from) {
    static message *batch[BATCH];
    int64_t records = 0;
    int ends = 0, error = from->assign(from->kafka, from->partitions);
    while (error == NO_ERROR && ends < from->partitions_count) {
        ssize_t got = from->consume(from->queue, WAIT_MS, batch, BATCH);
        for (ssize_t i = 0; i < got; i++) {
            if (batch[i]->err == NO_ERROR) records++;
            else if (batch[i]->err == PARTITION_EOF) ends++;
            else error = batch[i]->err;
            from->destroy_message(batch[i]);
        }
    }
    from->destroy_list(from->partitions);
    from->destroy_queue(from->queue);
    from->destroy(from->kafka);
    free(from);
    return error == NO_ERROR ? records : -labs((long)error);
}
